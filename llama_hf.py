"""
Llama 3 as Hugging Face has it: config.json, and the names and the order of the weights. Not a program:
export_weights.py reads and writes such folders.

Other models that are only Llama by another name (SmolLM2, TinyLlama, Mistral without a sliding window) are read, too;
what this project does not compute is refused, with the field that says so.
"""

from llmc.checkpoint import padded
from llmc.errors import UserError
from train_llama3 import Config

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
