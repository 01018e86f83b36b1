import sys,os,subprocess
sys.path[:0]=['.','tests']
os.chdir('.')
from llmcdev/token.compiler import compile_kernels
from llmcdev/token.precision import Precision
from llmcdev/token.decoder import decode_geometry
from llmcdev/token.geometry import model_constants
from llmcdev/token.decode_token import token_file
from llmcdev/token.device import GPU
import train_gpt2,train_llama3,train_speedrun, train_gpt2_cuda as g, train_llama3_cuda as l, train_speedrun_cuda as s
P=Precision("bfloat16",tf32=0); gpu=GPU("x","sm_90a",132,227<<10)
C=train_gpt2.Config; LC=train_llama3.Config; S=train_speedrun.Config
def file(arch,c,p=P,gpu=gpu,**more):
    k=model_constants(c,p)|arch.CONSTANTS|decode_geometry(arch,c,p,gpu.shared)
    f=token_file(arch,c,p,gpu,k)
    if f and more: f=f._replace(constants=f.constants|more)
    return f
cases={"124M":(g.GPT2,C(1024,50257,12,12,768,50304)),"1558M":(g.GPT2,C(1024,50257,48,25,1600,50304)),
"774M":(g.GPT2,C(1024,50257,36,20,1280,50304)),"l12":(l.Llama3,LC(300,1003,1,12,4,768,1024,2048,64,tied=0)),"s12":(s.Speedrun,S(1024,50257,12,6,768,50304)),
"smol":(l.Llama3,LC(300,1003,1,9,3,576,1024,1536,64)),"1B":(l.Llama3,LC(2048,128256,16,32,8,2048,128256,8192,64,factor=32))}
if __name__=="__main__":
  for n in sys.argv[1:] or cases:
    f=file(*cases[n])
    if not f: print(n,None); continue
    cubin=compile_kernels(f.name,"sm_90a",f.constants)
    open(f'/tmp/{n}.cubin','wb').write(cubin)
    print(n,{k:v for k,v in f.constants.items() if k.startswith("TOKEN")},len(cubin))
    B=''
    print(subprocess.run([B+'cuobjdump','-res-usage',f'/tmp/{n}.cubin'],capture_output=True,text=True).stdout.strip().splitlines()[-1])
    print(subprocess.run(['python3','dev/token/sass.py',f'/tmp/{n}.cubin'],capture_output=True,text=True,env=dict(os.environ,PATH=B+':'+os.environ['PATH'])).stdout[:400])
