"""
Llama 3 as Hugging Face has it: config.json, the names and the order of the weights, and the model in PyTorch, with
which train_llama3.py is compared. Not a program: export_weights.py reads and writes such folders.

Other models that are only Llama by another name (SmolLM2, TinyLlama, Mistral without a sliding window) are read, too;
what this project does not compute is refused, with the field that says so.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from llmc.checkpoint import padded
from llmc.errors import UserError
from llmc.tensors import allocate
from train_llama3 import Config, parameter_table, rope_table

SIZES = {"maxT": "max_position_embeddings", "V": "vocab_size", "L": "num_hidden_layers", "NH": "num_attention_heads",
         "C": "hidden_size", "F": "intermediate_size"}
EXPECTED = {  # what this Llama computes
    "hidden_act": ("silu",), "attention_bias": (False, None), "mlp_bias": (False, None), "sliding_window": (None,),
    "pretraining_tp": (1, None), "partial_rotary_factor": (1.0, None),
}  # fmt: skip
LAYER_TENSORS = {  # module within a layer: our tensor
    "input_layernorm": "ln1w", "self_attn.q_proj": "qkvw", "self_attn.k_proj": "qkvw", "self_attn.v_proj": "qkvw",
    "self_attn.o_proj": "attprojw", "post_attention_layernorm": "ln2w", "mlp.up_proj": "fcw", "mlp.gate_proj": "fcw",
    "mlp.down_proj": "fcprojw",
}  # fmt: skip


def config_of(hf, path):
    """The Config of a config.json, a dict; raises UserError for what this project does not compute."""
    for key, allowed in EXPECTED.items():
        if hf.get(key, allowed[0]) not in allowed:
            raise UserError(f"{path}: {key} is {hf[key]!r}, expected {allowed[0]!r}: not a Llama that this project"
                            " trains")
    rope = {"rope_theta": hf.get("rope_theta", 10_000.0)}
    rope |= (hf.get("rope_scaling") or {}) | (hf.get("rope_parameters") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(f"{path}: rope_type is {kind!r}, expected 'default' or 'llama3'")
    scaled = {}
    if kind == "llama3":
        names = {"factor": "factor", "low": "low_freq_factor", "high": "high_freq_factor",
                 "original": "original_max_position_embeddings"}
        scaled = {ours: whole(rope[theirs], theirs, path) for ours, theirs in names.items()}
    size = {ours: whole(hf[theirs], theirs, path) for ours, theirs in SIZES.items()}
    NKV, HS = (whole(hf.get(name) or default, name, path) for name, default in (
        ("num_key_value_heads", size["NH"]), ("head_dim", size["C"] // max(1, size["NH"]))))
    config = Config(**size, NKV=NKV, HS=HS, Vp=padded(size["V"]), tied=int(hf.get("tie_word_embeddings", False)),
                    eps=float(hf["rms_norm_eps"]), theta=float(rope["rope_theta"]), **scaled)
    if wrong := config.fault():
        raise UserError(f"{path}: {wrong}")
    return config


def whole(value, name, path):
    if type(value) not in (int, float) or value != int(value) or value < 1:
        raise UserError(f"{path}: {name} is {value!r}, expected a whole number of at least 1")
    return int(value)


def hf_config(config, bos, eos):
    """The config.json of a Config, a dict."""
    rope = {"rope_type": "default", "rope_theta": config.theta}
    if config.factor:
        rope |= {"rope_type": "llama3", "factor": float(config.factor), "low_freq_factor": float(config.low),
                 "high_freq_factor": float(config.high), "original_max_position_embeddings": config.original}
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False,
        "mlp_bias": False, **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
        "num_key_value_heads": config.NKV, "head_dim": config.HS, "rms_norm_eps": config.eps,
        "rope_parameters": rope, "rope_theta": config.theta, "rope_scaling": rope if config.factor else None,
        "tie_word_embeddings": bool(config.tied), "initializer_range": 0.02, "bos_token_id": bos, "eos_token_id": eos,
    }  # fmt: skip


def named_slices(config, tensors):
    """Yield (module's name, NumPy view, heads) of every weight, without padding. heads: 0, or those whose rows are all
    first halves, then all second halves, in Hugging Face's files, and neighbours here."""
    Q, K, F = config.Q, config.K, config.F
    rows = {"self_attn.q_proj": (0, Q), "self_attn.k_proj": (Q, Q + K), "self_attn.v_proj": (Q + K, Q + 2 * K),
            "mlp.up_proj": (0, F), "mlp.gate_proj": (F, 2 * F)}
    heads = {"self_attn.q_proj": config.NH, "self_attn.k_proj": config.NKV}
    yield "model.embed_tokens.weight", tensors.wte[: config.V], 0
    for l in range(config.L):
        for module, name in LAYER_TENSORS.items():
            view = getattr(tensors, name)[l][slice(*rows.get(module, (None,)))]
            yield f"model.layers.{l}.{module}.weight", view, heads.get(module, 0)
    yield "model.norm.weight", tensors.lnfw, 0
    if not config.tied:
        yield "lm_head.weight", tensors.lm_head[: config.V], 0


def neighbours(weight, heads):
    """Hugging Face's order of rows -> ours."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape) if heads else weight


def halves(weight, heads):
    """Our order of rows -> Hugging Face's."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape) if heads else weight


# ----------------------------------------------------------------------------------------------------------------------
# the reference in PyTorch, with Hugging Face's names


class RMSNorm(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(config.C)), config.eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Causal attention of grouped queries, (B, T, C) -> (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.q_proj, self.o_proj = nn.Linear(config.C, config.Q, bias=False), nn.Linear(config.Q, config.C, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(config.C, config.K, bias=False) for _ in range(2))

    def forward(self, x):
        (B, T, _), NH, NKV, HS = x.shape, self.config.NH, self.config.NKV, self.config.HS
        cos, sin = rotations(self.config, T, x.dtype)
        query, key, value = (project(x).view(B, T, -1, HS).transpose(1, 2)
                             for project in (self.q_proj, self.k_proj, self.v_proj))
        query, key = (part * cos + swapped(part) * sin for part in (query, key))
        heads = functional.scaled_dot_product_attention(query, *(part.repeat_interleave(NH // NKV, 1) for part in (
            key, value)), is_causal=True)
        return self.o_proj(heads.transpose(1, 2).reshape(B, T, NH * HS))


def rotations(config, T, dtype):
    """cos and sin (T, HS) of RoPE, for Hugging Face's halves."""
    return (torch.from_numpy(np.concatenate((part, part), 1)).to(dtype) for part in rope_table(config, T))


def swapped(x):
    """(first, second half) of each head -> (-second, first)."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up_proj, self.gate_proj = (nn.Linear(config.C, config.F, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(config.F, config.C, bias=False)

    def forward(self, x):
        return self.down_proj(self.up_proj(x) * functional.silu(self.gate_proj(x)))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(config), Attention(config)
        self.post_attention_layernorm, self.mlp = RMSNorm(config), MLP(config)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class ReferenceLlama(nn.Module):
    """Token ids (B, T), and targets or None -> logits (B, T, V), mean loss or None."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.V, config.C)
        self.model.layers = nn.ModuleList(Block(config) for _ in range(config.L))
        self.model.norm = RMSNorm(config)
        if not config.tied:
            self.lm_head = nn.Linear(config.C, config.V, bias=False)

    def head(self):
        return self.model.embed_tokens.weight if self.config.tied else self.lm_head.weight

    def forward(self, tokens, targets=None):
        x = self.model.embed_tokens(tokens)
        for block in self.model.layers:
            x = block(x)
        logits = functional.linear(self.model.norm(x), self.head())
        if targets is None:
            return logits, None
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def to_reference(config, params, dtype=torch.float32):
    """Return a ReferenceLlama on the CPU with our parameters."""
    with torch.device("meta"):
        model = ReferenceLlama(config)
    state = {name: torch.from_numpy(np.array(halves(view, heads))).to(dtype)
             for name, view, heads in named_slices(config, params)}
    model.load_state_dict(state, assign=True)
    return model


def collect_gradients(config, model, dtype="float32"):
    """Return the reference's gradients in our layout; padding is 0."""
    tensors, parameters = allocate(parameter_table(config, dtype)), dict(model.named_parameters())
    for name, view, heads in named_slices(config, tensors):
        view[...] = neighbours(parameters[name].grad.numpy(), heads)
    return tensors
