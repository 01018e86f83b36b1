"""decode_token against the chain of kernels: python dev/token/try.py on the GPU's machine, in the clone's
root. `--compile`, without a GPU: fills dev/token/cache with cubins for it."""

import os
import pathlib
import shutil
import sys
import tempfile
import time
from types import SimpleNamespace

ROOT = os.getcwd()
sys.path[:0] = [ROOT, os.path.join(ROOT, "tests"), os.path.join(ROOT, "dev/token")]
os.environ["TRAIN_GPT2_CACHE"] = os.path.join(ROOT, "dev/token", "cache")
os.environ.setdefault("OMP_NUM_THREADS", "8")

import numpy as np

import llmcdev/token.compiler as compiler
compiler.compiler_version = lambda: "NVRTC 13"  # the same here and there
import llmcdev/token.device as device_module
from llmcdev/token.compiler import KernelFile, prepare_kernels
from llmcdev/token.decoder import (TEXT_CONTROL, Decoder, decode_files, decode_layers, decode_logits,
                              decode_sample)
from llmcdev/token.geometry import kernel_files, launch_geometry
from llmcdev/token.precision import Precision
from llmc.tensors import allocate, bf16_to_float32, flat
from test_decode import tiles_of
import train_gpt2
import train_gpt2_cuda
import train_llama3
import train_llama3_cuda
import train_speedrun
import train_speedrun_cuda
import llmcdev/token.decode_token as decode_token
from llmcdev/token.geometry import model_constants
from llmcdev/token.decoder import decode_geometry

BEGAN = time.time()
P = Precision("bfloat16", tf32=0)
ARCH, SHARED = "sm_90a", 227 << 10
GPT2, LLAMA = train_gpt2_cuda.GPT2, train_llama3_cuda.Llama3
SPEEDRUN = train_speedrun_cuda.Speedrun
G, LC, SC = train_gpt2.Config, train_llama3.Config, train_speedrun.Config

CHECKS = {  # name -> architecture, config; compared with NumPy, too
    "gpt 768": (GPT2, G(1024, 1003, 2, 12, 768, 1024)),
    "gpt 1600": (GPT2, G(300, 1003, 1, 25, 1600, 1024)),
    "gpt 192": (GPT2, G(300, 1003, 3, 3, 192, 1024)),
    "smollm": (LLAMA, LC(300, 1003, 1, 9, 3, 576, 1024, 1536, 64)),
    "llama 128": (LLAMA, LC(300, 1003, 1, 6, 2, 768, 1024, 704, 128)),
    "speedrun": (SPEEDRUN, SC(1024, 1003, 2, 6, 768, 1024)),
}
TIMED = {
    "124M": (GPT2, G(1024, 50257, 12, 12, 768, 50304)),
    "1558M": (GPT2, G(1024, 50257, 48, 25, 1600, 50304)),
}
PAUSE = [("token_steps.cuh", "== count;\n            }\n        }",
          "== count;\n            }\n            if (!complete) __nanosleep(100);\n        }")]
STAMPS = [("token.cu", right, wrong) for right, wrong in (
    ("// normed = the norm of the residual stream after", """extern "C" __device__ int64 stamps[8 * (2 * L + 2)];
__device__ inline void stamp(int half, int place) {
    if (threadIdx.x == 0 && blockIdx.x == 0) stamps[half * 8 + place] = clock64();
}
// normed = the norm of the residual stream after"""),
    ("        if (half > 0)\n", "        stamp(half, 0);\n        if (half > 0)\n"),
    ("        if (takes_part) stream", "        stamp(half, 1);\n        if (takes_part) stream"),
    ("        vectors.request(w, half + 1);", "        stamp(half, 2);\n        vectors.request(w, half + 1);"),
    ("rows - 2), bias);\n", "rows - 2), bias);\n        stamp(half, 3);\n"),
    ("(shared, place, y, r, to, l);", "(shared, place, y, r, to, l);\n            stamp(half, 4);"),
    ("keys, values, maxT, position);\n#", "keys, values, maxT, position);\n            stamp(half, 4);\n#"),
    ("            exchange_parts(shared, place.rank, l);\n            workers_sync();",
     "            stamp(half, 5);\n            exchange_parts(shared, place.rank, l);\n"
     "            workers_sync();\n            stamp(half, 6);"),
    ("    stream.add_branch(sums + (2 * L - 1)", "    stamp(2 * L, 0);\n    stream.add_branch(sums + (2 * L - 1)"),
    ("    stream.normalize(shared.normed, vectors);\n}", "    stream.normalize(shared.normed, vectors);\n    stamp(2 * L, 2);\n}"),
    ("place, cursor);\n}\n\n// Block", "place, cursor);\n    stamp(2 * L + 1, 0);\n}\n\n// Block"),
)]
# model -> [(what, predicted us a step, constants, patches)]
VARIANTS = {
    "124M": [
        ("as committed", 136, {}, []),
        ("6 warps", 133, dict(TOKEN_WARPS=6), []),
        ("4 warps", 138, dict(TOKEN_WARPS=4), []),
        ("2 words together", 133, dict(TOKEN_TOGETHER=2), []),
        ("pauses", 134, {}, PAUSE),
        ("stamps", 137, {}, STAMPS),
    ],
    "1558M": [("as committed", 1060, {}, []),
              ("12 warps", 1070, dict(TOKEN_WARPS=12, TOKEN_SLOTS=7), []),
              ("2 words together", 1050, dict(TOKEN_TOGETHER=2), []),
              ("stamps", 1060, {}, STAMPS)],
}


def file_of(architecture, config, keywords):
    numbers = decode_geometry(architecture, config, P, SHARED)
    constants = model_constants(config, P) | architecture.CONSTANTS | numbers
    gpu = device_module.GPU("", ARCH, 132, SHARED)
    file = decode_token.token_file(architecture, config, P, gpu, constants)
    return file and file._replace(constants=file.constants | keywords)


def prepare(file, patches):
    """The cubin's path, of the kernels with other texts."""
    if not patches:
        return prepare_kernels(ARCH, [file])[0][0]
    right_directory = compiler.KERNEL_DIRECTORY
    with tempfile.TemporaryDirectory() as directory:
        shutil.copytree(right_directory, directory + "/kernels")
        for name, right, wrong in patches:
            path = pathlib.Path(directory, "kernels/decode", name)
            text = path.read_text()
            assert text.count(right) == 1, right
            path.write_text(text.replace(right, wrong))
        compiler.KERNEL_DIRECTORY = directory + "/kernels"
        try:
            return prepare_kernels(ARCH, [file])[0][0]
        finally:
            compiler.KERNEL_DIRECTORY = right_directory


def chain_files(architecture, config):
    geometry = launch_geometry(config, P, ARCH)
    update = kernel_files(architecture, config, P, ARCH, "cublaslt")["update"]
    return [update, *decode_files(architecture, config, P, geometry, SHARED)], geometry


def all_variants():
    for name, (architecture, config) in (CHECKS | TIMED).items():
        for what, _, keywords, patches in VARIANTS.get(name, [("", 0, {}, [])]):
            yield name, what, file_of(architecture, config, keywords), patches


def compile_all():
    for _, _, file, patches in all_variants():
        prepare(file, patches)
    files = []
    for name, (architecture, config) in (CHECKS | TIMED).items():
        files += chain_files(architecture, config)[0]
    return prepare_kernels(ARCH, files)[1]


# --------------------------------------------------------------------------------------------------
# a decoder with the chain, and decode_token beside it


FILL = r"""
extern "C" __global__ void fill(unsigned short* out, long long n, float mean, float spread,
                                unsigned int seed) {
    for (long long i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) {
        unsigned int x = (unsigned int)i * 0x9e3779b9u + seed;
        x = (x ^ x >> 16) * 0x7feb352du;
        x = (x ^ x >> 15) * 0x846ca68bu;
        x ^= x >> 16;
        float y = mean + spread * 1.732f * (x / 2147483648.0f - 1.0f);
        out[i] = (__float_as_uint(y) + 0x8000) >> 16;
    }
}"""


def fill(cp, params, config, seed):
    """Weights on the GPU: uniform, with a spread of 0.02; norms about 1, small biases."""
    kernel = cp.RawKernel(FILL, "fill")
    for number, (name, row) in enumerate(params.table.items()):
        spread = 0.02 if row.decays else 0.05
        if config.C < 1000 and row.decays:
            spread = 0.05  # so that logits of small models are not tiny
        if name in ("attprojw", "fcprojw"):
            spread = spread / (2 * config.L) ** 0.5
        tensor = getattr(params, name)
        kernel((1024,), (256,), (tensor, np.int64(tensor.size), np.float32(row.ones),
                                 np.float32(spread), np.uint32(seed + 77 * number)))
        if row.vocabulary:
            tensor[config.V :] = 0


def open_both(gpu, architecture, config, seed=1):
    from llmcdev/token.device import Device, cp
    from llmcdev/token.memory import Block
    files, geometry = chain_files(architecture, config)
    device = Device(gpu, files, geometry)
    with device.stream:
        params = allocate(architecture.parameter_table(config, P.dtype), cp)
        fill(cp, params, config, seed)
        text = Block({"text": Decoder.table(architecture, config, P, 1, config.maxT, geometry)})
        tensors = text.over(text.allocate())
        flat_kv = (tensors.keys, tensors.values)
        for tensor in flat_kv:
            tensor[...] = 0
    decoder = Decoder(architecture, device, config, params, tensors, 1, config.maxT)
    decoder.raw = params
    device.synchronize()
    return decoder


class Token:
    """A variant of decode_token, with a Decoder's tensors."""

    def __init__(self, decoder, file, patches=()):
        from llmcdev/token.device import cp
        self.decoder, self.cp, self.k = decoder, cp, file.constants
        device = decoder.device
        self.module = cp.RawModule(path=prepare(file, patches))
        self.function = self.module.get_function("decode_token")
        self.function.max_dynamic_shared_size_bytes = file.shared["decode_token"]
        self.function.preferred_shared_memory_carveout = 100
        self.shared = file.shared["decode_token"]
        decode_token.TOGETHER = self.k["TOKEN_TOGETHER"]
        self.use()
        self.whole = decode_token.TokenPass(decoder, decoder.raw, file.constants)
        self.reset = self.whole.reset
        self.resident = device.resident_clusters("decode_token", self.whole.grid, self.whole.block)

    def use(self):
        device = self.decoder.device
        device.functions["decode_token"] = self.function
        device.shared["decode_token"] = self.shared

    def launch(self):
        self.use()
        self.whole.launch()

    def step(self):
        self.launch()
        sample(self.decoder)

    def stamps(self):
        rows = 2 * self.decoder.config.L + 2
        memory = self.module.get_global("stamps")
        return self.cp.ndarray((rows, 8), self.cp.int64, memory).get()


def sample(d):
    decode_sample(d.device, d.acts.tokens, d.acts.randoms, d.acts.control, d.drawn, d.logprobs,
                  d.acts.logits, d.acts.tiles, 1)


def chain(decoder):
    acts = decoder.acts
    decode_logits(decoder.device, acts.logits, acts.tiles, *decode_layers(decoder, 1, 1),
                  acts.control, 1, decoder.config.Vp)


def graph_of(decoder, launch, times=1):
    stream = decoder.device.stream
    launch()
    stream.synchronize()
    stream.begin_capture()
    for _ in range(times):
        launch()
    return stream.end_capture()


def begin(decoder, position, token, temperature=1.0):
    decoder.set(position=position, step=0, top_k=0, temperature=temperature, top_p=1.0)
    with decoder.device.stream:
        decoder.acts.tokens[:1].set(np.array([token], np.int32))
        decoder.acts.randoms.set(np.array([12345], np.uint64))
    decoder.device.stream.synchronize()


def time_graph(decoder, graph, token, steps_each=1, replays=24, repeats=7, position=160):
    """Median us of a step."""
    from llmcdev/token.device import cp
    stream = decoder.device.stream
    begun, ended = cp.cuda.Event(), cp.cuda.Event()
    times = []
    for _ in range(repeats):
        begin(decoder, position, 7)
        if token:
            token.reset()
        graph.launch(stream)
        begun.record(stream)
        for _ in range(replays):
            graph.launch(stream)
        ended.record(stream)
        ended.synchronize()
        times.append(cp.cuda.get_elapsed_time(begun, ended) * 1e3 / (replays * steps_each))
    return float(np.median(times)), min(times)


# --------------------------------------------------------------------------------------------------
# checks


def cpu_decoder(architecture, decoder):
    """NumPy's, with the same weights."""
    from llmc.api import pages
    config = decoder.config
    page = next(page for page in pages() if page.Config is type(config))
    params = allocate(page.parameter_table(config))
    for name in params.table:
        getattr(params, name)[...] = bf16_to_float32(getattr(decoder.raw, name).get())
    return page.Decoder(config, params, 1, config.maxT)


def check(name, architecture, config, gpu, file):
    decoder = open_both(gpu, architecture, config)
    token = Token(decoder, file)
    V = config.V
    if token.resident < token.k["TOKEN_CLUSTERS"]:
        print(f"{name:10} {token.resident} clusters fit, {token.k['TOKEN_CLUSTERS']} wanted")
        return
    device, acts = decoder.device, decoder.acts
    cpu = cpu_decoder(architecture, decoder)
    worst = np.zeros(3)
    rng = np.random.default_rng(1)
    nans = 0
    for position in (0, 1, 7, 100, config.maxT // 2 + 3, config.maxT - 1):
        def random_past():
            past = rng.standard_normal((config.L, 1, config.NKV, config.maxT, config.HS),
                                       dtype=np.float32)
            past[:, :, :, position:] = np.nan
            return bf16_to_float32((past.view(np.uint32) >> 16).astype(np.uint16))
        keys, values = random_past(), random_past()
        own = keys
        if architecture is SPEEDRUN:
            own = keys / np.sqrt(np.square(keys).mean(-1, keepdims=True) + config.eps)
        cpu.cache.keys[...], cpu.cache.values[...] = own, values
        one = int(rng.integers(config.V))
        reference = np.array(cpu.forward(np.array([[one]], np.int32), position)).reshape(-1)
        scale = np.abs(reference[: config.V]).max()
        results = []
        for launch in (lambda: chain(decoder), token.launch):
            begin(decoder, position, one)
            token.reset()
            bits = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in (keys, values)]
            with device.stream:
                decoder.cache.keys.set(bits[0])
                decoder.cache.values.set(bits[1])
                acts.logits.view(np.uint8).fill(0xFF)
                acts.tiles.view(np.uint8).fill(0xFF)
                launch()
            device.synchronize()
            tiles = tiles_of(acts.logits.get(), V, device.geometry.DECODE_ROWS, 1.0)
            if not np.allclose(acts.tiles.get(), tiles, rtol=1e-5):
                print(f"{name}: tiles are wrong at {position}")
            results.append((acts.logits.get().reshape(-1), decoder.cache.keys.get(),
                            decoder.cache.values.get()))
        (a, ak, av), (b, bk, bv) = results
        nans += np.isnan(b).sum()
        a, b, reference = (x[: config.V] for x in (a, b, reference))
        error = np.abs([a - reference, b - reference, a - b]).max(-1) / scale
        worst = np.where(np.isnan(worst) | (error <= worst), worst, error)
        for x, y in ((ak, bk), (av, bv)):
            x, y = bf16_to_float32(x), bf16_to_float32(y)
            same = np.array_equal(np.delete(x, position, 3), np.delete(y, position, 3),
                                  equal_nan=True)
            here = np.abs(x[:, :, :, position] - y[:, :, :, position]).max()
            if not same or not here <= 0.05 * np.abs(x[:, :, :, position]).max():
                print(f"{name}: the cache differs at {position}: {same} {here}")
    ok = worst[1] <= max(2 * worst[0], 5e-3) and not nans
    print(f"{name:10} chain-ref {worst[0]:.1e} token-ref {worst[1]:.1e} chain-token {worst[2]:.1e}"
          f" nan {nans} heads {token.k['TOKEN_HEADS']}"
          f" slice {token.k['TOKEN_SLICE']} warps {token.k['TOKEN_WARPS']} slots {token.k['TOKEN_SLOTS']}"
          f" {'ok' if ok else 'FAILED'}", flush=True)


def check_steps(decoder, token, what):
    """16 steps of graphs: the same bits again; the chain's logits at the last of them."""
    device, acts = decoder.device, decoder.acts
    graph = graph_of(decoder, token.step)
    runs = []
    for _ in range(2):
        begin(decoder, 160, 7)
        token.reset()
        ids = []
        for _ in range(16):
            before = int(acts.tokens[:1].get()[0])
            acts.logits.view(np.uint8).fill(0xFF)
            device.synchronize()
            graph.launch(device.stream)
            device.synchronize()
            ids.append(int(acts.tokens[:1].get()[0]))
        runs.append((ids, acts.logits.get().reshape(-1)))
    begin(decoder, 175, before)
    chain(decoder)
    device.synchronize()
    other = acts.logits.get().reshape(-1)
    V = decoder.config.V
    difference = np.abs(other - runs[0][1])[:V].max() / np.abs(other[:V]).max()
    same = runs[0][0] == runs[1][0] and np.array_equal(runs[0][1], runs[1][1])
    print(f"   {what}: same bits again {same}, differs from the chain by {difference:.1e}",
          flush=True)
    return graph


NAMES = [["sum of fcproj there", "norm", "qkv", "messages q k v", "attention", "messages parts",
          "attproj"],
         ["sum of attproj there", "norm", "fc", "messages act", "fcproj"]]


def print_stamps(decoder, token, graph):
    rows = []
    L = decoder.config.L
    for i in range(20):
        if i == 0:
            begin(decoder, 160, 7)
            token.reset()
        graph.launch(decoder.device.stream)
        decoder.device.synchronize()
        rows.append(token.stamps())
    rows = np.array(rows[4:], np.float64)
    begins = rows[:, :, 0]
    halves = np.diff(begins, axis=1)
    print(f"   cycles, block 0: layers {(begins[:, 2 * L] - begins[:, 0]).mean():.0f}; last norm"
          f" {(rows[:, 2 * L, 2] - begins[:, 2 * L]).mean():.0f}; classifier"
          f" {(begins[:, 2 * L + 1] - rows[:, 2 * L, 2]).mean():.0f}")
    for kind, names in enumerate(NAMES):
        of = rows[:, kind + 2 : 2 * L : 2, : len(names)]
        end = begins[:, kind + 3 : 2 * L + 1 : 2, None]
        steps = np.diff(np.concatenate([of, end], 2), axis=2)
        print(f"   half {kind}: {halves[:, kind + 2 : 2 * L : 2].mean():.0f} = " + "; ".join(
            f"{name} {n:.0f} ({least:.0f}-{most:.0f})" for name, n, least, most in zip(
                names, steps.mean((0, 1)), steps.mean(0).min(0), steps.mean(0).max(0))))
    print("   by layer: " + " ".join(
        f"{x:.0f}" for x in (halves[:, 0:-1:2] + halves[:, 1::2])[:, :20].mean(0)))


# --------------------------------------------------------------------------------------------------


def find_clusters(gpu):
    """CLUSTERS = what the GPU has room for."""
    decoder = open_both(gpu, *CHECKS["gpt 768"])
    token = Token(decoder, file_of(*CHECKS["gpt 768"], {}))
    print(f"clusters of 8: {token.resident} fit, {token.k['TOKEN_CLUSTERS']} are used"
          f" ({token.shared >> 10} KB of dynamic shared memory)")


def run_times(gpu, name):
    from llmcdev/token.device import cp
    architecture, config = TIMED[name]
    decoder = open_both(gpu, architecture, config)
    device = decoder.device
    size = flat(decoder.raw).nbytes
    tied = decoder.params.lm_head is None
    floor = (size - (0 if tied else decoder.params.wte.nbytes)) / 4.25e6
    print(f"{name}: {size / 1e6:.0f} MB, {floor:.0f} us at 4.25 TB/s", flush=True)

    def old():
        chain(decoder)
        sample(decoder)
    with device.stream:
        begin(decoder, 160, 7)
        graph = graph_of(decoder, old)
        time_old = time_graph(decoder, graph, None)
        several = time_graph(decoder, graph_of(decoder, old, 4), None, 4, 6)
        sampler = time_graph(decoder, graph_of(decoder, lambda: sample(decoder)), None)
    print(f"   chain: {time_old[0]:7.1f} us (best {time_old[1]:.1f}), 4 steps a graph"
          f" {several[0]:.1f}; the sampler alone {sampler[0]:.1f}", flush=True)
    for what, predicted, keywords, patches in VARIANTS[name]:
        try:
            token = Token(decoder, file_of(architecture, config, keywords), patches)
            if token.resident < token.k["TOKEN_CLUSTERS"]:
                print(f"   {what}: only {token.resident} clusters fit")
                continue
            with device.stream:
                begin(decoder, 160, 7)
                token.reset()
                graph = check_steps(decoder, token, what)
                if what == "stamps":
                    print_stamps(decoder, token, graph)
                new = time_graph(decoder, graph, token)
                several = time_graph(decoder, graph_of(decoder, token.step, 4), token, 4, 6)
                late = time_graph(decoder, graph, token, position=config.maxT - 40)
            print(f"   {what:18} {new[0]:7.1f} us (best {new[1]:.1f}, predicted {predicted}),"
                  f" {1e6 / new[0]:6.0f} tok/s, {floor / new[0]:.0%} of the floor;"
                  f" 4 steps a graph {several[0]:.1f}; at the last positions {late[0]:.1f};"
                  f" slots {token.k['TOKEN_SLOTS']} under way {token.k['TOKEN_FLIGHT']}"
                  f" heads {token.k['TOKEN_HEADS']} [{time.time() - BEGAN:.0f} s]", flush=True)
        except Exception as error:  # the others shall run, too
            print(f"   {what}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            if "CUDA" in type(error).__name__ and "rror" in str(error):
                raise
    cp.get_default_memory_pool().free_all_blocks()


def main():
    if "--compile" in sys.argv:
        compile_all()
        return
    from llmcdev/token.device import open_gpu
    gpu = open_gpu()
    print(gpu, flush=True)
    find_clusters(gpu)
    print(f"[{time.time() - BEGAN:.0f} s] compiled now: {compile_all()}"
          f" [{time.time() - BEGAN:.0f} s]", flush=True)
    only = [a for a in sys.argv[1:] if not a.startswith("-")]
    for name in CHECKS:
        if not only:
            check(name, *CHECKS[name], gpu, file_of(*CHECKS[name], {}))
    print(f"[{time.time() - BEGAN:.0f} s]", flush=True)
    for name in TIMED:
        if not only or name in only:
            run_times(gpu, name)
    os.system("nvidia-smi --query-gpu=clocks.sm,clocks.mem,temperaturedev/token --format=csv,noheader")
    print(f"[{time.time() - BEGAN:.0f} s]")


if __name__ == "__main__":
    main()
