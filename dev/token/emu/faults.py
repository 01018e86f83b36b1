import sys,re,shutil
sys.path[:0]=['dev/token/emu','dev/token','.','tests']
name=sys.argv[1]
import ast
src=open('tests/test_decode_token.py').read()
block=src[src.index('FAULTS = {'):]; block=block[:block.index('\n}\n')+2]
exec(block)
file,right,wrong=FAULTS[name]
import os
D='/tmp/faultk_%d/'%os.getpid()
shutil.copytree('kernels',D)
t=open(D+'decode/'+file).read(); assert t.count(right)==1,(t.count(right)); open(D+'decode/'+file,'w').write(t.replace(right,wrong))
import build; build.K=D
sys.argv=['x','none']
c=open('dev/token/emu/check.py').read()
c=c[:c.index('for n in sys.argv')].replace("'/tmp/emu3_{name}'","'/tmp/emuf_%d'"%os.getpid()).replace('from build import build','from build import build')
c=c.replace("params=random_params(c,3)","from test_decode import random_model; params=random_model(c,3)")
exec(c)
cases["real768"]=(g.GPT2,GC(100,1003,2,4,256,1024),dict(clusters=4,TOKEN_SLOTS=9))
print('FAULT',name); check("real768",(1,))
