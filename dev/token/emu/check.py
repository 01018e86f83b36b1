import sys, os, ctypes
sys.path[:0]=['.','tests','dev/token','dev/token/emu']
os.chdir('.')
import numpy as np
from build import build
from llmcdev/token.decode_token import WEIGHTS
from llmcdev/token.precision import Precision
from llmcdev/token.decoder import with_optional, TEXT_CONTROL
from llmc.tensors import bf16_bits, bf16_to_float32, flat
import train_gpt2, train_llama3, train_speedrun
import train_gpt2_cuda as g, train_llama3_cuda as l, train_speedrun_cuda as s
from conftest import random_params, page_of
P=Precision("bfloat16",tf32=0)
LC=train_llama3.Config
GC=train_gpt2.Config
S=train_speedrun.Config
cases={
 "real768":(g.GPT2,GC(100,250,2,3,192,256),dict(clusters=3,TOKEN_SLOTS=9)),
 "gpt":(g.GPT2,GC(100,1003,2,4,256,1024),dict(clusters=3,TOKEN_SLOTS=5,TOKEN_WARPS=6,TOKEN_TOGETHER=2)),
 "gptodd":(g.GPT2,GC(100,250,3,5,320,256),dict(clusters=3,TOKEN_SLOTS=4,TOKEN_FLIGHT=2)),
 "four":(g.GPT2,GC(100,1003,2,12,768,1024),dict(clusters=12,TOKEN_SLOTS=7,TOKEN_WARPS=4)),
 "llama":(l.Llama3,LC(100,250,2,4,2,256,256,352,64),dict(clusters=5,TOKEN_WARPS=5,TOKEN_SLOTS=5)),
 "llama2":(l.Llama3,LC(100,250,2,8,2,512,256,512,64),dict(clusters=4,TOKEN_SLOTS=6)),
 "llama128":(l.Llama3,LC(100,250,1,4,2,512,256,704,128),dict(clusters=5,TOKEN_SLOTS=7)),
 "speed":(s.Speedrun,S(100,250,2,2,256,256),dict(clusters=4,TOKEN_SLOTS=6)),
}
from comp import file
from test_decode import tiles_of
def check(name,positions=(0,5,59)):
    arch,c,kw=cases[name]
    more=dict(kw); clusters=more.pop('clusters'); more.setdefault('TOKEN_FLIGHT',3); from llmcdev/token.device import GPU; f=file(arch,c,gpu=GPU('x','sm_90a',8*clusters+8,227<<10),**more); k=f and f.constants
    assert k, name
    print(name,{x:y for x,y in k.items() if x.startswith("TOKEN")})
    lib=build(k,f'/tmp/emu3_{name}')
    params=random_params(c,3)
    flat(params)[:]=bf16_to_float32(bf16_bits(flat(params)))
    bits={n:np.ascontiguousarray(bf16_bits(getattr(params,n))) for n in params.table}
    def aligned(a):
        raw=np.empty(a.nbytes+64,np.uint8); off=-raw.ctypes.data%64
        out=raw[off:off+a.nbytes].view(a.dtype).reshape(a.shape); out[...]=a; return out
    bits={n:aligned(a) for n,a in bits.items()}
    bits.setdefault("lm_head",bits["wte"])
    ptrs=np.array([bits[n].ctypes.data if n in bits else 0 for n in WEIGHTS],np.uint64)
    NKV,HS=c.NKV,c.HS
    make=lambda n: np.void(np.array([bits[n].ctypes.data],np.uint64).tobytes()+np.array([bits[n].shape[-1],c.C,c.L,c.C//8],np.int32).tobytes())
    maps=[np.frombuffer(make(n).tobytes(),np.uint8).copy() for n in ('attprojw','fcprojw')]
    cpu=page_of(c).Decoder(c,params,1,c.maxT)
    rope=arch.rope(c,c.maxT)
    rope=aligned(np.asarray(rope,np.float32)) if rope is not None else None
    for pos in positions:
        rng=np.random.default_rng(pos)
        keys=np.full((c.L,1,NKV,c.maxT,HS),np.nan,np.float32); vals=keys.copy()
        keys[:,:,:,:pos]=bf16_to_float32(bf16_bits(rng.standard_normal(keys[:,:,:,:pos].shape,dtype=np.float32)))
        vals[:,:,:,:pos]=bf16_to_float32(bf16_bits(rng.standard_normal(keys[:,:,:,:pos].shape,dtype=np.float32)))
        kin=keys
        if name=="speed":
            kin=keys/np.sqrt(np.square(keys).mean(-1,keepdims=True)+c.eps)
        cpu.cache.keys[...]=kin; cpu.cache.values[...]=vals
        tok=np.array([[rng.integers(c.V)]],np.int32)
        ref=np.array(cpu.forward(tok,pos)).reshape(-1)
        kb,vb=aligned(bf16_bits(keys)),aligned(bf16_bits(vals))
        T=k['TOKEN_TOGETHER']; sums=aligned(np.zeros((2,2*c.L,c.C//T,16),np.uint64)); step=pos%2; sums[1-step,:,:,:T]=12345; R=k['DECODE_ROWS']; tiles=np.full((1,c.Vp//R,4),np.nan,np.float32); temp=(0.,.7,1.)[pos%3]
        logits=np.full(c.Vp,np.nan,np.float32)
        control=np.zeros(1,TEXT_CONTROL); control["position"]=pos; control["step"]=step; control["temperature"]=temp
        p=lambda a: ctypes.c_void_p(a.ctypes.data if a is not None else 0)
        lib.run(p(logits),p(tiles),p(sums),p(kb),p(vb),p(tok),p(ptrs),p(maps[0]),p(maps[1]),p(rope),p(control),c.maxT)
        e=np.abs(logits[:c.V]-ref[:c.V]).max()/np.abs(ref[:c.V]).max()
        nk=bf16_to_float32(kb)[:,:,:,pos]; ck=np.array(cpu.cache.keys)[:,:,:,pos]
        if name=="speed": nk=nk/np.sqrt(np.square(nk).mean(-1,keepdims=True)+c.eps)
        ek=np.abs(nk-ck).max()/np.abs(ck).max()
        ev=np.abs(bf16_to_float32(vb)[:,:,:,pos]-np.array(cpu.cache.values)[:,:,:,pos]).max()/np.abs(np.array(cpu.cache.values)[:,:,:,pos]).max()
        untouched=np.array_equal(np.delete(kb,pos,3),np.delete(bf16_bits(keys),pos,3))
        print(f"  pos {pos} err {e:.2e} keys {ek:.2e} values {ev:.2e} nan {np.isnan(logits).sum()} others zero {not sums[1-step].any()} counts {np.unique(sums[step]%32)} tiles {np.allclose(tiles,tiles_of(logits[None],c.V,R,temp),rtol=1e-5)} untouched {untouched}",flush=True)
for n in sys.argv[1:] or cases: check(n)
