"""Text on a GPU: forward passes over T new positions of each of B sequences, with a KV cache, and
sampling.

Of an architecture, a class like GPT2 of train_gpt2_cuda.py, it uses parameter_table, HAS, CONSTANTS
and rope. decode_layers is one for all of them: a bias, position embedding or norm that the
parameters lack is None to a kernel."""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from llmc.gpu.decode_geometry import CLUSTER, decode_files, decode_shared, token_file
from llmc.gpu.device import Device, copy_to_gpu, cp, pinned_array, pointer
from llmc.gpu.geometry import WARP, blocks, check_sizes, kernel_files, launch_geometry
from llmc.gpu.memory import Block
from llmc.gpu.precision import Precision, copy_weights, resolve_dtype
from llmc.sampler import check_diverged
from llmc.tensors import Row, allocate, layer

# --------------------------------------------------------------------------------------------------
# launches of kernels/decode/, in the order of step.cuh


def launch_decode(device, name, grid, *arguments, shared=None):
    """Launch a kernel of kernels/decode/ that uses programmatic dependent launch."""
    device.launch(name, grid, (WARP * device.geometry.DECODE_WARPS,), *arguments, shared=shared,
                  early=True)


def decode_matmul(device, name, arguments, N, OC, parts=1, normalizes=False):
    """Launch a matmul of N rows with a weight (OC, inner dimension), which is cut into parts of C
    elements at most. normalizes: it does the layernorm, too."""
    g = device.geometry
    shared = {stages: decode_shared(g, stages, N, normalizes)
              for stages in range(1, g.DECODE_STAGES + 1)}
    resident = {stages: min(g.DECODE_BLOCKS, g.DECODE_SHARED // size)
                for stages, size in shared.items()}

    tiles = OC // g.DECODE_ROWS
    groups = blocks(N, g.DECODE_X_ROWS)
    grid = min(tiles, max(1, device.sm_count * resident[1] // (groups * parts)))
    if groups > 1:
        # equally many tiles each: fewer blocks, which read x less often
        grid = blocks(tiles, blocks(tiles, grid))

    stages = max(n for n in shared
                 if n == 1 or n <= blocks(tiles, grid) and resident[n] == resident[1])
    launch_decode(device, name, (groups, grid, parts), *arguments, N, stages, shared=shared[stages])


class Normed(NamedTuple):
    """A matmul's input: the norm of the new residual stream, inp + branch_bias + parts of branches
    (.,N,C). Kernels take the fields as arguments, in this order."""

    residual: object
    inp: object
    branches: object
    branch_bias: object
    normed: object  # made by decode_layernorm; None: the matmul does it
    weight: object
    bias: object


def decode_embed(device, residual, branches, tokens, wte, wpe, weight, control, B, T):
    """residual (B,T,C) = wte[tokens] + wpe or, with a weight (C,), its RMSNorm; branches (fcproj's
    parts,B,T,C) = 0. tokens (B,T) int32; the first position is control's, here and below."""
    launch_decode(device, "decode_embed", (B * T,), residual, branches, tokens, wte, wpe, weight,
                  control, T)


def decode_layernorm(device, x, parts, N):
    """x.residual (N,C) = x.inp (N,C) + x.branch_bias (C,) + x.branches (parts,N,C); x.normed (N,C)
    = its norm. Returns the Normed for the next matmul, which does all this itself where N is
    small."""
    if N <= device.geometry.DECODE_FEW:
        return x._replace(normed=None)
    launch_decode(device, "decode_layernorm", (N,), x.normed, x.residual, x.inp, x.branches,
                  x.branch_bias, x.weight, x.bias, parts)
    return x


def decode_qkv(device, query, keys, values, x, weight, bias, rope, control, B, T, OC):
    """query (B,T,Q) = and, in keys and values (B,NKV,maxT,HS), their positions =: x @ weight
    (OC,C)^T + bias, rotated by rope (maxT,HS/2,2), if there is one."""
    arguments = query, keys, values, *x, weight, bias, rope, control, keys.shape[2], T
    decode_matmul(device, "decode_qkv", arguments, B * T, OC, normalizes=x.normed is None)


def decode_attention(device, atty, parts, arrived, query, keys, values, control, B, T, NH):
    """atty (B,T,Q) = attention of query (B,T,Q) to all positions so far, QK-normed if the model
    does. arrived: 0 before and after."""
    splits = min(parts.shape[2], blocks(2 * device.sm_count, B * T * NH))
    launch_decode(device, "decode_attention", (NH, splits, B * T), atty, parts, arrived, query,
                  keys, values, control, keys.shape[2], T)


def decode_project(device, branches, inp, weight, parts, width, N, C, IC):
    """branches (parts,N,C) = inp (N,IC) @ weight (C,IC)^T, the sum over each `width` of IC
    apart."""
    decode_matmul(device, "decode_project", (branches, inp, weight, IC, width), N, C, parts=parts)


def decode_fc(device, act, x, weight, bias, N, OC):
    """act (N,F) = the model's activation function of x @ weight (OC,C)^T + bias."""
    decode_matmul(device, "decode_fc", (act, *x, weight, bias), N, OC, normalizes=x.normed is None)


def decode_logits(device, logits, tiles, x, weight, bias, control, B, Vp):
    """logits (B,Vp) = x @ weight (Vp,C)^T + bias, capped if the model does; tiles (B,.,4): sums of
    their exponentials for decode_sample. x, weight, bias: what decode_layers has returned."""
    decode_matmul(device, "decode_logits", (logits, tiles, *x, weight, bias, control), B, Vp,
                  normalizes=x.normed is None)


def decode_sample(device, tokens, randoms, control, drawn, logprobs, logits, tiles, B):
    """tokens (B,) = the next ones, drawn with randoms (B,) and control's Choice; they also go, with
    their log-probabilities, to the host: the step's row of drawn and logprobs (ring,B). control:
    position and step += 1."""
    device.launch("decode_sample", (B,), (device.geometry.DECODE_SAMPLE_THREADS,), tokens, randoms,
                  control, pointer(drawn), pointer(logprobs), logits, tiles, len(drawn), early=True)


# --------------------------------------------------------------------------------------------------
# a pass over all layers


OPTIONAL = ("wpe", "ln0w", "ln1b", "qkvb", "attprojb", "ln2b", "fcb", "fcprojb", "lnfb", "lm_head",
            "lm_headb")


def with_optional(tensors):
    """Parameters by name; those of OPTIONAL that the architecture lacks are None."""
    return SimpleNamespace(**dict.fromkeys(OPTIONAL) | vars(tensors))


def decode_table(architecture, config, N, dtype):
    """name -> Row of what a pass over N rows, B*T, needs beside the cache."""
    C, Q, F = config.C, config.NH * config.HS, config.F
    table = {
        "residual": Row((2, N, C)),  # ping-pong buffers: one is made from the other and `branches`
        # of attproj, fcproj: the parts of their sums
        "branches": Row((blocks(max(Q, F), C), N, C)),
        "normed": Row((N, C), dtype),
        "query": Row((N, Q), dtype),  # rotated
        "atty": Row((N, Q), dtype),
        "fch_act": Row((N, F), dtype),  # after the activation function
    }
    if "fcprojb" in architecture.parameter_table(config):
        table["zeros"] = Row((C,), dtype)  # in place of fcproj's bias, below the first layer
    return table


def decode_layers(decoder, B, T):
    """decoder.acts.tokens (B, T), at the next T positions -> the classifier's input, a Normed, its
    weight and bias."""
    device, config, params, acts = decoder.device, decoder.config, decoder.params, decoder.acts
    g = device.geometry
    C, Q, F = config.C, config.NH * config.HS, config.F
    N = B * T
    inp, residual = acts.residual

    def normed(weight, bias, branch_bias, parts):
        nonlocal inp, residual
        x = Normed(residual, inp, acts.branches, branch_bias, acts.normed, weight, bias)
        inp, residual = residual, inp
        return decode_layernorm(device, x, parts, N)

    decode_embed(device, inp, acts.branches, acts.tokens, params.wte, params.wpe, params.ln0w,
                 acts.control, B, T)
    fcprojb_below = getattr(acts, "zeros", None)

    for p, cache in decoder.layers:
        x = normed(p.ln1w, p.ln1b, fcprojb_below, g.DECODE_FC_PARTS)
        decode_qkv(device, acts.query, cache.keys, cache.values, x, p.qkvw, p.qkvb, decoder.rope,
                   acts.control, B, T, len(p.qkvw))
        decode_attention(device, acts.atty, acts.parts, acts.arrived, acts.query, cache.keys,
                         cache.values, acts.control, B, T, config.NH)
        decode_project(device, acts.branches, acts.atty, p.attprojw, g.DECODE_ATT_PARTS,
                       g.DECODE_ATT_WIDTH, N, C, Q)

        x = normed(p.ln2w, p.ln2b, p.attprojb, g.DECODE_ATT_PARTS)
        decode_fc(device, acts.fch_act, x, p.fcw, p.fcb, N, len(p.fcw))
        decode_project(device, acts.branches, acts.fch_act, p.fcprojw, g.DECODE_FC_PARTS,
                       g.DECODE_FC_WIDTH, N, C, F)
        fcprojb_below = p.fcprojb

    x = normed(params.lnfw, params.lnfb, fcprojb_below, g.DECODE_FC_PARTS)
    return x, params.wte if params.lm_head is None else params.lm_head, params.lm_headb


WEIGHTS = ("wte", "wpe", "ln0w", "lnfw", "lnfb", "lm_head", "lm_headb", "ln1w", "ln1b", "qkvw",
           "qkvb", "attprojb", "ln2w", "ln2b", "fcw", "fcb", "fcprojb")  # struct Weights


class TokenPass:
    """A Decoder's decode_token: from its token to the logits, which decode_sample reads."""

    def __init__(self, decoder, params, constants):
        """params: Tensors on the GPU, of all layers; constants: of the KernelFile."""
        config, acts, self.device = decoder.config, decoder.acts, decoder.device
        self.grid = (CLUSTER * constants["TOKEN_CLUSTERS"],)
        self.block = (WARP * (constants["TOKEN_WARPS"] + 1),)
        tensors = {"lm_head": params.wte} | vars(params)
        addresses = [tensors[name].data.ptr if name in tensors else 0 for name in WEIGHTS]
        weights = np.void(np.array(addresses, np.uint64).tobytes())
        maps = [self.device.tensor_map(tensors[name], config.C // CLUSTER, 64)
                for name in ("attprojw", "fcprojw")]
        with self.device.stream:
            self.sums = cp.zeros((2, 2 * config.L, 4 * config.C), np.uint64)  # see token.cuh
        self.arguments = (acts.logits, acts.tiles, self.sums, acts.keys, acts.values, acts.tokens,
                          weights, *maps, decoder.rope, acts.control, decoder.T)

    def reset(self):
        """Before a text's first step."""
        with self.device.stream:
            self.sums.fill(0)

    def launch(self):
        """logits and tiles = those of tokens[0] at control's position; its keys and values go to
        the cache."""
        self.device.launch("decode_token", self.grid, self.block, *self.arguments)


def open_token(decoder, params, file):
    """The Decoder's TokenPass, or None without a KernelFile, or where the GPU has no room for all
    blocks at once: they wait for each other. Two of these kernels must not run at the same time, as
    under MPS: each might wait for the other's multiprocessors."""
    if not file:
        return None
    token = TokenPass(decoder, params, file.constants)
    resident = decoder.device.resident_clusters("decode_token", token.grid, token.block)
    return token if resident * CLUSTER >= token.grid[0] else None


# --------------------------------------------------------------------------------------------------
# text, token by token


TEXT_CONTROL = np.dtype([("position", "i4"), ("step", "i4"), ("arrived", "i4"), ("top_k", "i4"),
                         ("temperature", "f4"), ("top_p", "f4")])  # struct Control of step.cuh
PROMPT_ROWS = 64  # tokens of prompts in one pass


class Decoder:
    """A model for text on the GPU, as train_gpt2.py's Decoder is in NumPy. A step, from a token to
    the next one, is one CUDA graph; the host reads its tokens while the next steps run."""

    AHEAD = 3  # steps in flight while the host waits for one

    def __init__(self, architecture, device, config, params, tensors, B, T):
        """For B sequences of at most T positions. params: Tensors on the GPU; tensors:
        Decoder.table's, zeroed; device: with decode_files' kernels."""
        self.device, self.config = device, config
        self.params = with_optional(params)
        self.B, self.T = B, T
        for name, function in device.functions.items():
            # the same for all: otherwise two kernels cannot share a multiprocessor
            if name.startswith("decode"):
                function.preferred_shared_memory_carveout = 100

        self.acts = tensors
        self.cache = SimpleNamespace(keys=tensors.keys, values=tensors.values)  # (L,B,NKV,T,HS)
        with device.stream:
            angles = architecture.rope(config, T)
            self.rope = None if angles is None else cp.asarray(angles)
        self.layers = []  # each layer's parameters, and its cache
        for l in range(config.L):
            cache = SimpleNamespace(keys=tensors.keys[l], values=tensors.values[l])
            self.layers.append((with_optional(layer(params, l)), cache))

        ring = self.AHEAD + 1
        self.drawn = pinned_array(4 * ring * B).view(np.int32).reshape(ring, B)
        self.logprobs = pinned_array(4 * ring * B).view(np.float32).reshape(ring, B)
        self.done = [cp.cuda.Event(disable_timing=True) for _ in range(ring)]
        self.graph = None
        self.token = None  # a TokenPass, which does steps instead of decode_layers

    @staticmethod
    def table(architecture, config, precision, B, T, geometry):
        """name -> Row of the KV cache, and of what the passes need."""
        N = max(B, PROMPT_ROWS)
        NH, HS = config.NH, config.HS
        kept = Row((config.L, B, config.NKV, T, HS), precision.dtype, stacked=True)
        return {
            "keys": kept,
            "values": kept,
            "tokens": Row((N,), "int32"),
            **decode_table(architecture, config, N, precision.dtype),
            # of attention, for each split
            "parts": Row((N, NH, blocks(T, geometry.DECODE_SPLIT), HS + 4)),
            "arrived": Row((N, NH), "int32"),  # blocks of attention
            "logits": Row((B, config.Vp)),
            "tiles": Row((B, config.Vp // geometry.DECODE_ROWS, 4)),  # of logits: TileOfLogits
            "randoms": Row((B,), "uint64"),
            "control": Row((TEXT_CONTROL.itemsize,), "uint8"),
        }

    def draw(self, prompt, count, randoms, choice, want_logprobs=True):
        """llmc/sampler.py's draw, on the GPU; the log-probabilities are always computed."""
        first = prompt.shape[1]
        end = first + count
        tokens = np.empty((self.B, end), np.int32)
        tokens[:, :first] = prompt
        self.set(step=0, top_k=min(choice.top_k, self.config.V), temperature=choice.temperature,
                 top_p=choice.top_p)
        if self.token:
            self.token.reset()
        with self.device.stream:
            copy_to_gpu(self.acts.randoms, np.array([one.state for one in randoms], np.uint64))

        begin = 0  # of the window
        begun = first  # tokens drawn, or in flight
        for t in range(first, end):
            last = min(end, t + self.AHEAD + 1)
            while begun < last and (begun == t or begun - begin <= self.T):
                if begun - begin > self.T:
                    begin = begun - max(1, self.T // 2)
                    self.read(tokens[:, begin:begun])
                elif begun == first:
                    self.read(tokens[:1, :first])
                self.step((begun - first) % len(self.done))
                begun += 1

            turn = (t - first) % len(self.done)
            self.done[turn].synchronize()
            tokens[:, t] = self.drawn[turn]
            check_diverged(self.logprobs[turn])
            for random in randoms:
                random.u32()  # as the GPU did
            yield tokens[:, t], self.logprobs[turn].copy()

    def set(self, **values):
        """Set fields of `control`."""
        with self.device.stream:
            for name, value in values.items():
                kind, at = TEXT_CONTROL.fields[name]
                copy_to_gpu(self.acts.control[at : at + kind.itemsize], np.array([value], kind))

    def read(self, tokens):
        """Prefill: all sequences continue from tokens (B, P), or (1, P) where they have the same
        ones. The last token is left for the next step."""
        B = len(tokens)
        last = tokens.shape[1] - 1
        each = max(1, PROMPT_ROWS // B)
        for begin in range(0, last, each):
            some = np.ascontiguousarray(tokens[:, begin : min(begin + each, last)])
            self.set(position=begin)
            with self.device.stream:
                copy_to_gpu(self.acts.tokens[: some.size], some)
            decode_layers(self, *some.shape)

        if B < self.B and last:
            for tensor in (self.cache.keys, self.cache.values):  # (L,B,...) [:, 1:] = [:, :1]
                row, pitch = tensor[0, 0].nbytes, tensor[0].nbytes
                for b in range(1, self.B):
                    cp.cuda.runtime.memcpy2DAsync(
                        tensor[0, b].data.ptr, pitch, tensor.data.ptr, pitch, row, len(tensor),
                        cp.cuda.runtime.memcpyDeviceToDevice, self.device.stream.ptr)

        self.set(position=last)
        latest = np.ascontiguousarray(np.broadcast_to(tokens[:, -1], self.B))
        with self.device.stream:
            copy_to_gpu(self.acts.tokens[: self.B], latest)

    def step(self, turn):
        """Launch the step that draws each sequence's next token, for the host in row `turn`. The
        first step loads all kernels, then it is captured."""
        stream = self.device.stream
        if self.graph:
            self.graph.launch(stream)
            self.done[turn].record(stream)
        else:
            self.launch_step()
            self.done[turn].record(stream)
            stream.begin_capture()
            self.launch_step()
            self.graph = stream.end_capture()

    def launch_step(self):
        device, acts, B = self.device, self.acts, self.B
        if self.token:
            self.token.launch()
        else:
            decode_logits(device, acts.logits, acts.tiles, *decode_layers(self, B, 1), acts.control,
                          B, self.config.Vp)
        decode_sample(device, acts.tokens, acts.randoms, acts.control, self.drawn, self.logprobs,
                      acts.logits, acts.tiles, B)


def open_decoder(architecture, gpu, config, params, B, T, dtype="auto"):
    """A Decoder on this GPU for a model on the host. Raises UserError for a model that is too large
    for the kernels or this GPU."""
    check_sizes(config)
    precision = Precision(resolve_dtype(dtype, gpu.arch), tf32=0)
    geometry = launch_geometry(config, precision, gpu.arch)
    update = kernel_files(architecture, config, precision, gpu.arch, "cublaslt")["update"]
    files = [update, *decode_files(architecture, config, precision, geometry, gpu.shared)]
    token = (token_file(architecture, config, precision, gpu, files[-1].constants) if B == 1
             else None)
    device = Device(gpu, [*files, token] if token else files, geometry)
    with device.stream:
        on_gpu = allocate(architecture.parameter_table(config, precision.dtype), cp)
        copy_weights(device, on_gpu, params)
        text = Block({"text": Decoder.table(architecture, config, precision, B, T, geometry)})
        tensors = text.over(text.allocate())
    decoder = Decoder(architecture, device, config, on_gpu, tensors, B, T)
    decoder.token = open_token(decoder, on_gpu, token)
    return decoder
