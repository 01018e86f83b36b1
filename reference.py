"""
The reference: GPT-2, Llama 3 and a speed run's GPT in PyTorch, with autograd, to compare with in
tests and benchmarks.

Not a program: export_weights.py makes debug states with it, and test_gpt2.py compares the trainers
with it.
"""

import contextlib
import functools
import math
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from llmc.debugstate import DebugState, fingerprint
from llmc.errors import UserError
from llmc.huggingface import gpt2_slices, llama_slices, to_ours, to_theirs
from llmc.tensors import allocate
from train_gpt2 import GPT2
from train_llama3 import Llama3, rope_table
from train_speedrun import Speedrun
from reference_optimizers import MuonAndAdamW, adamw

ADAMW = dict(learning_rate=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
CAP = 15.0
SCALE = 0.12
EPS = float(np.finfo(np.float32).eps)  # of a speed run
MUON = dict(learning_rate=2.5e-3, beta1=0.8, beta2=0.95, eps=1e-15, weight_decay=0.05)
LLMC_LLAMA_TEST = dict(learning_rate=1e-5, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0)

# --------------------------------------------------------------------------------------------------
# the model. Language Models are Unsupervised Multitask Learners, Radford et al. 2019. The names are
# Hugging Face's.


class Reference(nn.Module):
    """A model: token ids (B, T), and targets or None -> logits (B, T, V), mean loss or None."""

    cross_entropy = staticmethod(F.cross_entropy)

    def with_loss(self, logits, targets):
        return (logits, None if targets is None
                else self.cross_entropy(logits.flatten(0, 1), targets.flatten()))


def precise_cross_entropy(logits, targets):
    """In float64: PyTorch's float32 sum over 49152 tokens, on a CPU, has ten times the error of all
    else."""
    return F.cross_entropy(logits.double(), targets).float()


class Attention(nn.Module):
    """Causal self-attention, (B, T, C) -> (B, T, C)."""

    def __init__(self, config, flash):
        super().__init__()
        self.NH = config.NH
        self.flash = flash
        self.c_attn = nn.Linear(config.C, 3 * config.C)
        self.c_proj = nn.Linear(config.C, config.C)

    def forward(self, x):
        B, T, C = x.shape
        query, key, value = (part.view(B, T, self.NH, C // self.NH).transpose(1, 2)
                             for part in self.c_attn(x).split(C, dim=2))
        if self.flash:
            y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = query @ key.transpose(-2, -1) / math.sqrt(C // self.NH)  # (B, NH, T, T)
            later = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
            y = scores.masked_fill(later, -torch.inf).softmax(dim=-1) @ value  # (B, NH, T, HS)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """(B, T, C) -> (B, T, 4C) -> (B, T, C), with the tanh form of GELU."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.C, 4 * config.C)
        self.c_proj = nn.Linear(4 * config.C, config.C)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config, flash):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.C)
        self.attn = Attention(config, flash)
        self.ln_2 = nn.LayerNorm(config.C)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class ReferenceGPT2(Reference):
    """GPT-2 for PyTorch's autograd; with `flash`, attention is F.scaled_dot_product_attention.
    Without targets, logits are the last position's (B, 1, V)."""

    def __init__(self, config, flash=False):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.V, config.C)
        self.wpe = nn.Embedding(config.maxT, config.C)
        self.h = nn.ModuleList(Block(config, flash) for _ in range(config.L))
        self.ln_f = nn.LayerNorm(config.C)

    def forward(self, inputs, targets=None):
        x = self.wte(inputs) + self.wpe(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x if targets is not None else x[:, -1:])
        # the classifier is tied to the embedding
        return self.with_loss(F.linear(x, self.wte.weight), targets)


class RMSNorm(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.C))
        self.eps = config.eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class LlamaAttention(nn.Module):
    """Causal attention of grouped queries, (B, T, C) -> (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.q_proj = nn.Linear(config.C, config.Q, bias=False)
        self.o_proj = nn.Linear(config.Q, config.C, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(config.C, config.K, bias=False) for _ in range(2))

    def forward(self, x):
        B, T, _ = x.shape
        NH, NKV, HS = self.config.NH, self.config.NKV, self.config.HS
        cos, sin = rotations(self.config, T, x)
        query, key, value = (project(x).view(B, T, -1, HS).transpose(1, 2)
                             for project in (self.q_proj, self.k_proj, self.v_proj))
        query, key = (part * cos + swapped(part) * sin for part in (query, key))
        heads = F.scaled_dot_product_attention(query,
                                               *(part.repeat_interleave(NH // NKV, 1) for part in (
            key, value)), is_causal=True)
        return self.o_proj(heads.transpose(1, 2).reshape(B, T, NH * HS))


def rotations(config, T, like):
    """cos and sin (T, HS) of RoPE, as `like`, for Hugging Face's halves."""
    return (torch.from_numpy(np.concatenate((part, part), 1)).to(like)
            for part in rope_table(config, T))


def swapped(x):
    """(first, second half) of each head -> (-second, first)."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class LlamaMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up_proj, self.gate_proj = (nn.Linear(config.C, config.F, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(config.F, config.C, bias=False)

    def forward(self, x):
        return self.down_proj(self.up_proj(x) * F.silu(self.gate_proj(x)))


class LlamaBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = RMSNorm(config)
        self.self_attn = LlamaAttention(config)
        self.post_attention_layernorm = RMSNorm(config)
        self.mlp = LlamaMLP(config)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class ReferenceLlama(Reference):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.V, config.C)
        self.model.layers = nn.ModuleList(LlamaBlock(config) for _ in range(config.L))
        self.model.norm = RMSNorm(config)
        if not config.tied:
            self.lm_head = nn.Linear(config.C, config.V, bias=False)

    def head(self):
        return self.model.embed_tokens.weight if self.config.tied else self.lm_head.weight

    def forward(self, tokens, targets=None):
        x = self.model.embed_tokens(tokens)
        for block in self.model.layers:
            x = block(x)
        return self.with_loss(F.linear(self.model.norm(x), self.head()), targets)


class ReferenceSpeedrun(Reference):
    """train_speedrun.py's model, with the names of its tensors."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        for name, row in Speedrun.parameter_table(config).items():
            shape = (config.V, *row.shape[1:]) if row.vocabulary else row.shape
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def forward(self, tokens, targets=None):
        B, T = tokens.shape
        config = self.config
        norm = functools.partial(F.rms_norm, eps=EPS)
        cos, sin = half_rotations(config, T, self.wte)
        x = norm(self.wte[tokens], [config.C], self.ln0w)
        for l in range(config.L):
            y = F.linear(norm(x, [config.C], self.ln1w[l]), self.qkvw[l], self.qkvb[l])
            query, key, value = (part.view(B, T, config.NH, config.HS)
                                 for part in y.split(config.C, 2))
            query, key = (rotated(norm(part, [config.HS]), cos, sin) for part in (query, key))
            y = F.scaled_dot_product_attention(*(part.transpose(1, 2)
                                                 for part in (query, key, value)), is_causal=True,
                                               scale=SCALE).transpose(1, 2).reshape(B, T, config.C)
            x = x + F.linear(y, self.attprojw[l], self.attprojb[l])
            y = F.relu(F.linear(norm(x, [config.C], self.ln2w[l]), self.fcw[l],
                                self.fcb[l])).square()
            x = x + F.linear(y, self.fcprojw[l], self.fcprojb[l])
        logits = F.linear(norm(x, [config.C], self.lnfw), self.lm_head, self.lm_headb)
        return self.with_loss(CAP * logits * torch.rsqrt(logits.square() + CAP**2), targets)


def half_rotations(config, T, like, rounded=lambda x: x):
    """cos and sin (T, 1, HS/2), as `like`, of RoPE that leaves half of the pairs as they are."""
    frequencies = rounded((1 / 1024) ** torch.linspace(0, 1, config.HS // 4, dtype=torch.float64))
    angles = rounded(torch.arange(T, dtype=torch.float64)[:, None] * frequencies)
    angles = torch.cat((angles, torch.zeros_like(angles)), 1)[:, None]
    return angles.cos().to(like), angles.sin().to(like)


def rotated(x, cos, sin):
    """x (B, T, NH, HS), whose pairs are neighbors."""
    a = x[..., 0::2]
    b = x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


REFERENCES = {GPT2: ReferenceGPT2, Llama3: ReferenceLlama, Speedrun: ReferenceSpeedrun}


def page_of(config):
    """The class of the page that a Config is from."""
    return next(page for page in REFERENCES if type(config) is page.Config)


def settings_of(config):
    """Of the optimizer, for the steps of a debug state."""
    return MUON if page_of(config) is Speedrun else ADAMW


@torch.no_grad()
def generate(model, tokens, length, generator, top_k=40):
    """Append `length` sampled tokens to tokens (1, T)."""
    for _ in range(length):
        logits = model(tokens[:, -model.config.maxT :])[0][:, -1].float()
        best, ids = logits.topk(min(top_k, logits.shape[-1]))
        choice = torch.multinomial(best.softmax(dim=-1), 1, generator=generator)
        tokens = torch.cat((tokens, ids.gather(1, choice)), dim=1)
    return tokens


# --------------------------------------------------------------------------------------------------
# our tensors, and the reference's modules


def module_slices(config, tensors):
    """Yield (module's name, NumPy view, order) for every parameter of the reference, as
    llama_slices does."""
    if page_of(config) is Llama3:
        return llama_slices(config, tensors)
    if page_of(config) is Speedrun:
        return ((name, getattr(tensors, name)[: config.V if row.vocabulary else None], 0)
                for name, row in tensors.table.items())
    # the reference's are (out, in)
    return ((name, view, 0) for name, view, _ in gpt2_slices(config, tensors))


def to_reference(config, params, flash=False, dtype=torch.float32):
    """Return the reference of this architecture on the CPU, with our parameters."""
    page = page_of(config)
    with torch.device("meta"):
        model = REFERENCES[page](config, *[flash] * (page is GPT2))
    state = {name: torch.from_numpy(np.array(to_theirs(view, order))).to(dtype)
             for name, view, order in module_slices(config, params)}
    model.load_state_dict(state, assign=True)
    return model


def collect_gradients(config, model, dtype="float32"):
    """Return the reference's gradients in our layout; padding is 0."""
    tensors = allocate(page_of(config).parameter_table(config, dtype))
    parameters = dict(model.named_parameters())
    for name, view, order in module_slices(config, tensors):
        view[...] = to_ours(parameters[name].grad.numpy(), order)
    return tensors


# --------------------------------------------------------------------------------------------------
# the run on one batch


def optimizer_of(model, settings, tokens):
    """The architecture's optimizer, for updates of so many tokens."""
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if isinstance(model, ReferenceSpeedrun):
        return MuonAndAdamW(model, settings, tokens)
    return adamw(model.parameters(), settings)


def overfit(model, x, y, iterations, settings, autocast=contextlib.nullcontext, capture=None,
            report=None, norms=None):
    """Train on one batch; returns the loss of each iteration, before its update. norms: a list, for
    those of the gradients, which are then clipped to 1.

    capture(logits, loss) is called once, after the first backward pass; report(iteration, loss,
    seconds) after each update.
    """
    optimizer = optimizer_of(model, settings, x.numel())
    losses = []
    for iteration in range(iterations):
        start = time.perf_counter()
        with autocast():
            logits, loss = model(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if capture and iteration == 0:
            capture(logits, loss)
        if norms is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())  # also waits for a GPU
        if report:
            report(iteration, losses[-1], time.perf_counter() - start)
    return losses


def print_iteration(iteration, loss, seconds):
    print(f"iteration {iteration}, loss: {loss:.6f}, time: {seconds * 1000:.3f} ms", flush=True)


def run_inference(model, x, y, iterations, autocast):
    for iteration in range(iterations):
        start = time.perf_counter()
        with torch.no_grad(), autocast():
            loss = model(x, y)[1].item()
        print_iteration(iteration, loss, time.perf_counter() - start)


def make_debug_state(config, params, x, y, iterations, report=None):
    """Train in float32 on the CPU, on one batch, for the parity test; returns (DebugState, trained
    model)."""
    model = to_reference(config, params)
    state = {}
    settings = settings_of(config)
    model.cross_entropy = precise_cross_entropy

    def capture(logits, loss):
        state.update(logits=logits.detach().numpy(), loss=loss.item(),
                     grads=collect_gradients(config, model))

    x_long, y_long = (torch.from_numpy(ids).long() for ids in (x, y))
    losses = overfit(model, x_long, y_long, iterations, settings, capture=capture, report=report)
    if not iterations:
        logits, loss = model(x_long, y_long)
        loss.backward()
        capture(logits, loss)
    history = None
    norms = []
    if page_of(config) is Llama3:
        history = overfit(to_reference(config, params), x_long, y_long, iterations, LLMC_LLAMA_TEST,
                          norms=norms), norms
    state = DebugState(x, y, **state, optimizer=settings, losses=np.array(losses, np.float32),
                       crc=fingerprint(config, params), history=history
                       and np.array(history, np.float32))
    return state, model


def run_benchmark(args, config, params, x, y):
    """Run the same steps with the benchmark flags; returns the model."""
    device = choose_device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = bool(args.tensorcores)
    model = to_reference(config, params, bool(args.flash)).to(device)
    step_model = torch.compile(model) if args.compile else model
    dtype = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[args.dtype]
    autocast = functools.partial(torch.autocast, torch.device(device).type, dtype,
                                 enabled=dtype is not None)
    x, y = (torch.from_numpy(ids).long().to(device) for ids in (x, y))
    if args.inference_only:
        run_inference(step_model, x, y, args.num_iterations, autocast)
    else:
        overfit(step_model, x, y, args.num_iterations, settings_of(config), autocast,
                report=print_iteration)
    return model


def describe():
    return f", PyTorch {torch.__version__}, {torch.get_num_threads()} threads"


def print_sample(model, vocabulary):
    device = next(model.parameters()).device
    start = torch.full((1, 1), vocabulary.eot, device=device)
    tokens = generate(model, start, 32, torch.Generator(device).manual_seed(42))
    print(f"generating:\n---\n{vocabulary.decode(tokens[0, 1:].tolist())}\n---")


def choose_device(name):
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: {str(error).splitlines()[0]}; expected cpu, cuda or mps") from None
    return name


@contextlib.contextmanager
def torch_errors_as_lines():
    """Turn PyTorch's RuntimeErrors (out of memory, no C++ compiler for --compile) into UserErrors
    of one line."""
    try:
        yield
    except RuntimeError as error:
        raise UserError(f"PyTorch: {next(iter(str(error).splitlines()), type(error).__name__)}") from None
