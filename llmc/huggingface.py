"""
Hugging Face's folders: what config.json says, the names and the order of the weights, a model from such a folder.

Of GPT-2 and of Llama 3. Other models that are only Llama by another name (SmolLM2, TinyLlama, Mistral without a sliding
window) are read, too; what this project does not compute is refused, with the field that says so.
"""

import dataclasses
import json
import os

import numpy as np

from llmc.checkpoint import padded
from llmc.errors import UserError, import_package
from llmc.files import open_input
from llmc.tensors import allocate, check_finite

# ----------------------------------------------------------------------------------------------------------------------
# Llama 3

SIZES = {"maxT": "max_position_embeddings", "V": "vocab_size", "L": "num_hidden_layers", "NH": "num_attention_heads",
         "C": "hidden_size", "F": "intermediate_size"}
LLAMA_EXPECTED = {  # what this Llama computes
    "hidden_act": ("silu",), "attention_bias": (False, None), "mlp_bias": (False, None), "sliding_window": (None,),
    "pretraining_tp": (1, None), "partial_rotary_factor": (1.0, None),
}  # fmt: skip
LLAMA_LAYER = {  # module within a layer: our tensor
    "input_layernorm": "ln1w", "self_attn.q_proj": "qkvw", "self_attn.k_proj": "qkvw", "self_attn.v_proj": "qkvw",
    "self_attn.o_proj": "attprojw", "post_attention_layernorm": "ln2w", "mlp.up_proj": "fcw", "mlp.gate_proj": "fcw",
    "mlp.down_proj": "fcprojw",
}  # fmt: skip


def llama_config_of(hf, path, Config):
    """The Config of a config.json, a dict; raises UserError for what this project does not compute."""
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


def llama_hf_config(config, bos, eos):
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


def llama_slices(config, tensors):
    """Yield (module's name, NumPy view, heads) of every weight, without padding. heads: 0, or those whose rows are all
    first halves, then all second halves, in Hugging Face's files, and neighbours here."""
    Q, K, F = config.Q, config.K, config.F
    rows = {"self_attn.q_proj": (0, Q), "self_attn.k_proj": (Q, Q + K), "self_attn.v_proj": (Q + K, Q + 2 * K),
            "mlp.up_proj": (0, F), "mlp.gate_proj": (F, 2 * F)}
    heads = {"self_attn.q_proj": config.NH, "self_attn.k_proj": config.NKV}
    yield "model.embed_tokens.weight", tensors.wte[: config.V], 0
    for l in range(config.L):
        for module, name in LLAMA_LAYER.items():
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
# GPT-2: our 16 stacked tensors and Hugging Face's

GPT2_LAYER = {  # our name -> the module's name within a layer
    "ln1w": "ln_1.weight", "ln1b": "ln_1.bias", "qkvw": "attn.c_attn.weight", "qkvb": "attn.c_attn.bias",
    "attprojw": "attn.c_proj.weight", "attprojb": "attn.c_proj.bias", "ln2w": "ln_2.weight", "ln2b": "ln_2.bias",
    "fcw": "mlp.c_fc.weight", "fcb": "mlp.c_fc.bias", "fcprojw": "mlp.c_proj.weight", "fcprojb": "mlp.c_proj.bias",
}  # fmt: skip
GPT2_GLOBAL = {"wte": "wte.weight", "wpe": "wpe.weight", "lnfw": "ln_f.weight", "lnfb": "ln_f.bias"}
TRANSPOSED = ("qkvw", "attprojw", "fcw", "fcprojw")  # Hugging Face's GPT-2 keeps these as (in, out)


def gpt2_slices(config, tensors):
    """Yield (our name, module's name, NumPy view) for every parameter of the reference, without the padding of wte."""
    for name in tensors.table:
        tensor = getattr(tensors, name)
        if name in GPT2_GLOBAL:
            yield name, GPT2_GLOBAL[name], tensor[: config.V] if name == "wte" else tensor
        else:
            for l in range(config.L):
                yield name, f"h.{l}.{GPT2_LAYER[name]}", tensor[l]


GPT2_EXPECTED = {  # what this GPT-2 computes; a config.json that says otherwise belongs to another architecture
    "model_type": ("gpt2",), "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}  # fmt: skip


def gpt2_config_of(hf, config_path, Config):
    """The Config of GPT-2's config.json, a dict."""
    if hf.get("n_inner") not in (None, 4 * hf["n_embd"]):
        raise UserError(f"{config_path}: n_inner is {hf['n_inner']}, expected 4 * n_embd = {4 * hf['n_embd']}")
    for key in ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd"):
        if type(hf[key]) is not int:
            raise UserError(f"{config_path}: {key} is {hf[key]!r}, expected a whole number")
    V = hf["vocab_size"]
    config = Config(maxT=hf["n_positions"], V=V, L=hf["n_layer"], NH=hf["n_head"], C=hf["n_embd"], Vp=padded(V))
    if min(dataclasses.astuple(config)) < 1 or config.C % config.NH:
        raise UserError(f"{config_path}: impossible sizes: {config.describe()}")
    return config


# ----------------------------------------------------------------------------------------------------------------------
# folders

HINT = "expected a Hugging Face folder with config.json and model.safetensors"


def find_weights(folder):
    """Return (path, [path]) of a folder's model.safetensors or, if there is none, the index and the shards it names."""
    whole, index = (os.path.join(folder, f"model.safetensors{end}") for end in ("", ".index.json"))
    if os.path.lexists(whole) or not os.path.lexists(index):
        return whole, [whole]
    try:
        with open_input(index, HINT) as f:
            return index, [os.path.join(folder, name) for name in sorted(set(json.load(f)["weight_map"].values()))]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{index}: not the index of a model's shards ({error!r})") from None


def read_hf_folder(folder, gpt2, llama):
    """Read (architecture, config, params) from a Hugging Face folder: config.json and model.safetensors, no pickle.
    gpt2, llama: the classes of the two pages."""
    _, safetensors, torch = (import_package(name, "a Hugging Face folder")
                             for name in ("torch", "safetensors", "safetensors.torch"))
    path = config_path = os.path.join(folder, "config.json")
    try:
        with open_input(config_path, HINT) as f:
            hf = json.load(f)
        architecture, config_of, expected = gpt2, gpt2_config_of, GPT2_EXPECTED
        if hf.get("model_type") in ("llama", "mistral"):
            architecture, config_of, expected = llama, llama_config_of, LLAMA_EXPECTED
        for key, allowed in expected.items():
            if hf.get(key, allowed[0]) not in allowed:
                raise UserError(f"{config_path}: {key} is {hf[key]!r}, expected {allowed[0]!r}: not a"
                                f" {architecture.TITLE} that this project trains")
        config = config_of(hf, config_path, architecture.Config)
        weights_path, shards = find_weights(folder)
        state = {}
        for path in shards:
            open_input(path, HINT).close()
            state |= torch.load_file(path)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{config_path}: not the configuration of a GPT-2 or Llama ({error!r})") from None
    except safetensors.SafetensorError as error:
        raise UserError(f"{path}: not a safetensors file ({error})") from None

    state = {key.removeprefix("transformer."): value for key, value in state.items()}

    def fetch(module_name, shape, transposed=False):
        if module_name not in state:
            raise UserError(f"{weights_path}: tensor {module_name} is missing")
        tensor = state[module_name]
        if not tensor.is_floating_point():
            raise UserError(f"{weights_path}: {module_name} is of {str(tensor.dtype).removeprefix('torch.')}, expected"
                            " floating-point weights")
        tensor = tensor.float().numpy()
        tensor = tensor.T if transposed else tensor
        if tensor.shape != shape:
            raise UserError(f"{weights_path}: {module_name} has shape {tensor.shape}, expected {shape} from"
                            " config.json")
        return tensor

    if architecture is llama:
        params = read_llama(config, fetch, llama.parameter_table(config))
    else:
        fetch("wte.weight", (config.V, config.C))  # these three check all sizes before anything is allocated
        fetch("wpe.weight", (config.maxT, config.C))
        fetch(f"h.{config.L - 1}.ln_1.weight", (config.C,))
        params = allocate(gpt2.parameter_table(config))
        for name, module_name, view in gpt2_slices(config, params):
            view[:] = fetch(module_name, view.shape, name in TRANSPOSED)
        if "lm_head.weight" in state and not np.array_equal(fetch("lm_head.weight", (config.V, config.C)),
                                                            params.wte[: config.V]):
            raise UserError(f"{weights_path}: lm_head.weight differs from wte.weight: this project ties the two")
    check_finite(weights_path, params, "download or save it again")
    return architecture, config, params


def read_llama(config, fetch, table):
    fetch("model.embed_tokens.weight", (config.V, config.C))  # these two check sizes before anything is allocated
    fetch(f"model.layers.{config.L - 1}.mlp.down_proj.weight", (config.C, config.F))
    params = allocate(table)
    for module_name, view, heads in llama_slices(config, params):
        view[:] = neighbours(fetch(module_name, view.shape), heads)
    return params
