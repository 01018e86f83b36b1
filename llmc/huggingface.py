"""Hugging Face's folders: their config.json, names and order of weights, and a model from such a
folder: GPT-2, Llama 3 or a model that is Llama by another name (SmolLM2, TinyLlama, Mistral without
a sliding window). What asks for anything else is refused, by its name: a field of config.json, or a
tensor that is not read."""

import dataclasses
import json
import math
import os
import re

import numpy as np

from llmc.checkpoint import padded
from llmc.errors import UserError, import_package
from llmc.files import open_input
from llmc.tensors import allocate, bf16_to_float32, check_finite, table_elements

HINT = "expected a Hugging Face folder with config.json and model.safetensors"
# safetensors' name -> NumPy's; BF16: its bits
STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}
# fields that change no logits; nor do unknown ones that are null, false, 0 or empty
HARMLESS = re.compile(
    r"_.*|architectures|auto_map|transformers(\.js)?_.*|(torch_)?dtype|model_type|.*_token_id|use_cache|.*_range|n_ctx|"
    r"(.*_)?(dropout|pdrop)|summary_.*|output_.*|return_dict.*|id2label|label2id|problem_type|task_specific_params|"
    r"chunk_size_.*|is_llama_config|reorder_and_upcast_attn|do_sample|temperature|(top|typical)_[kp]|tokenizer_.*|prefix|"
    r"(model_)?(max|min)(_sequence)?_length|num_beam.*|num_return_sequences|.*_penalty|.*_ngram_size|max_window_layers|"
    r"use_sliding_window|pretraining_tp|unsloth_.*|attn_implementation|num_labels|gradient_checkpointing|neftune_.*")
# tensors that are no weights
UNREAD = re.compile(r"h\.\d+\.attn\.(masked_)?bias|.*\.rotary_emb\.inv_freq")

# Llama 3
LLAMA_SIZES = {"maxT": "max_position_embeddings", "V": "vocab_size", "L": "num_hidden_layers",
               "NH": "num_attention_heads", "C": "hidden_size", "F": "intermediate_size"}
LLAMA_EXPECTED = {  # what this Llama computes
    "hidden_act": ("silu",), "attention_bias": (False, None), "mlp_bias": (False, None),
    "is_causal": (True,),
    "partial_rotary_factor": (1.0, None), "tie_word_embeddings": (False, True)}
LLAMA_FIELDS = {*LLAMA_SIZES.values(), *LLAMA_EXPECTED, "num_key_value_heads", "head_dim",
                "rms_norm_eps", "rope_theta",
                "rope_scaling", "rope_parameters", "sliding_window", "layer_types"}
LLAMA_LAYER = {  # module within a layer: our tensor
    "input_layernorm": "ln1w", "self_attn.q_proj": "qkvw", "self_attn.k_proj": "qkvw",
    "self_attn.v_proj": "qkvw",
    "self_attn.o_proj": "attprojw", "post_attention_layernorm": "ln2w", "mlp.up_proj": "fcw",
    "mlp.gate_proj": "fcw",
    "mlp.down_proj": "fcprojw"}


def llama_config_of(hf, path, Config):
    """The Config of a config.json, a dict; raises UserError for what this project does not
    compute."""
    rope = {"rope_theta": hf.get("rope_theta", 10_000.0)}
    # the first alone, as in transformers
    rope |= hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"{path}: rope_type is {kind!r} in {rope}, expected 'default' or 'llama3',"
                        " of whole heads")
    # Mistral's without the field
    window = hf.get("sliding_window", 4096 if hf["model_type"] == "mistral" else None)
    if window is not None and not hf["max_position_embeddings"] <= window < 2**31:
        raise UserError(f"{path}: sliding_window is {window}, expected at least"
                        f" max_position_embeddings = {hf['max_position_embeddings']}: not a Llama"
                        " that this project trains")
    if other := {*(hf.get("layer_types") or ())} - {"full_attention", "sliding_attention"}:
        raise UserError(f"{path}: layer_types has {min(other)!r}, expected 'full_attention'")
    scaled = {"factor": "factor", "low": "low_freq_factor", "high": "high_freq_factor",
              "original": "original_max_position_embeddings"} if kind == "llama3" else {}
    size = whole_numbers(hf, LLAMA_SIZES, path)
    # if config.json has no others
    heads = {"num_key_value_heads": size["NH"], "head_dim": size["C"] // size["NH"]}
    heads |= {name: hf[name] for name in heads if hf.get(name)}
    size |= whole_numbers(heads, {"NKV": "num_key_value_heads", "HS": "head_dim"}, path)
    return Config(**size, **whole_numbers(rope, scaled, path), Vp=padded(size["V"]),
                  eps=float(hf["rms_norm_eps"]),
                  theta=float(rope["rope_theta"]), tied=int(hf.get("tie_word_embeddings", False)))


def whole_numbers(hf, names, path):
    """{our name: value} of {our name: Hugging Face's} in a dict of config.json."""
    for name in names.values():
        value = hf[name]
        if type(value) not in (int, float) or value != int(value) or not 1 <= value < 2**31:
            raise UserError(f"{path}: {name} is {value!r:.60}, expected a whole number from 1 to"
                            " 2^31 - 1")
    return {ours: int(hf[theirs]) for ours, theirs in names.items()}


def llama_slices(config, tensors):
    """Yield (module's name, NumPy view, order) of every weight, without padding. order: 0, or the
    heads where RoPE turns pairs of rows, which are neighbors here; Hugging Face stores all first
    rows of a head, then all second."""
    Q, K, F = config.Q, config.K, config.F
    rows = {"self_attn.q_proj": (0, Q), "self_attn.k_proj": (Q, Q + K),
            "self_attn.v_proj": (Q + K, Q + 2 * K),
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


# GPT-2
GPT2_LAYER = {  # our name -> the module's name within a layer
    "ln1w": "ln_1.weight", "ln1b": "ln_1.bias", "qkvw": "attn.c_attn.weight",
    "qkvb": "attn.c_attn.bias",
    "attprojw": "attn.c_proj.weight", "attprojb": "attn.c_proj.bias", "ln2w": "ln_2.weight",
    "ln2b": "ln_2.bias",
    "fcw": "mlp.c_fc.weight", "fcb": "mlp.c_fc.bias", "fcprojw": "mlp.c_proj.weight",
    "fcprojb": "mlp.c_proj.bias"}
GPT2_GLOBAL = {"wte": "wte.weight", "wpe": "wpe.weight", "lnfw": "ln_f.weight", "lnfb": "ln_f.bias"}
GPT2_EXPECTED = {  # what this GPT-2 computes
    "model_type": ("gpt2",), "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,), "is_causal": (True,)}
GPT2_SIZES = {"maxT": "n_positions", "V": "vocab_size", "L": "n_layer", "NH": "n_head",
              "C": "n_embd"}
GPT2_FIELDS = {*GPT2_SIZES.values(), *GPT2_EXPECTED, "n_inner"}


def gpt2_slices(config, tensors):
    """The same of GPT-2. order: 0, or -1 where Hugging Face keeps a weight as (in, out)."""
    for name in tensors.table:
        tensor = getattr(tensors, name)
        if name in GPT2_GLOBAL:
            yield GPT2_GLOBAL[name], tensor[: config.V] if name == "wte" else tensor, 0
        else:
            for l in range(config.L):
                yield f"h.{l}.{GPT2_LAYER[name]}", tensor[l], -(name
                                                                in ("qkvw", "attprojw", "fcw",
                                                                    "fcprojw"))


def gpt2_config_of(hf, path, Config):
    """The Config of GPT-2's config.json, a dict."""
    if hf.get("n_inner") not in (None, 4 * hf["n_embd"]):
        raise UserError(f"{path}: n_inner is {hf['n_inner']}, expected 4 * n_embd ="
                        f" {4 * hf['n_embd']}")
    size = whole_numbers(hf, GPT2_SIZES, path)
    return Config(**size, Vp=padded(size["V"]))


def to_ours(weight, order, pairs=(2, -1)):
    """A weight of Hugging Face's in the order of ours. order: see llama_slices and gpt2_slices."""
    if order > 0:
        return weight.reshape(order, *pairs, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
    return weight.T if order else weight


def to_theirs(weight, order):
    """The inverse of to_ours."""
    return to_ours(weight, order, (-1, 2))


def with_our_prefix(state, prefix, embedding):
    """A folder's tensors, {name: tensor}, named as here: `prefix`, then a name such as `embedding`.
    A model that was saved without its head, or within another module, has another prefix, or none:
    that of its embedding."""
    embeddings = [name for name in state if f".{name}".endswith(f".{embedding}")]
    if len(embeddings) != 1:
        return state

    theirs = embeddings[0].removesuffix(embedding)
    named = {}
    for name, tensor in state.items():
        before_head = name.removesuffix("lm_head.weight")
        if before_head != name and theirs.startswith(before_head):
            name = "lm_head.weight"
        elif name.startswith(theirs):
            name = prefix + name.removeprefix(theirs)
        named[name] = tensor
    return named


NOT_READABLE = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)


def read_config(path, gpt2, llama):
    """(architecture, config) of a config.json. gpt2, llama: the two pages' classes."""
    try:
        with open_input(path, HINT) as f:
            hf = json.load(f)
        architecture, config_of, expected, known = gpt2, gpt2_config_of, GPT2_EXPECTED, GPT2_FIELDS
        if hf.get("model_type") in ("llama", "mistral"):
            architecture, config_of, expected, known = (llama, llama_config_of, LLAMA_EXPECTED,
                                                        LLAMA_FIELDS)
        for key, value in {**dict.fromkeys(expected), **hf}.items():
            is_harmless = key in known or not value or HARMLESS.fullmatch(key)
            allowed = expected.get(key, (value if is_harmless else None,))
            if hf.get(key, allowed[0]) not in allowed:
                raise UserError(f"{path}: {key} is {value!r:.60}, expected {allowed[0]!r}: not a"
                                f" {architecture.TITLE} that this project trains")
        config = config_of(hf, path, architecture.Config)
    except NOT_READABLE as error:
        raise UserError(f"{path}: not the configuration of a GPT-2 or Llama ({error!r})") from None
    if wrong := config.fault():
        raise UserError(f"{path}: {wrong}")
    return architecture, config


def shards_of(folder):
    """(the file that names the weights, the paths of those that hold them): model.safetensors, or
    an index and the files that it names."""
    path = os.path.join(folder, "model.safetensors")
    index = f"{path}.index.json"
    if os.path.lexists(path) or not os.path.lexists(index):
        return path, [path]
    try:
        with open_input(index, HINT) as f:
            names = sorted(set(json.load(f)["weight_map"].values()))
        for name in names:
            if os.path.isabs(name) or ".." in name.split("/"):
                raise UserError(f"{index}: names {name!r:.60}, expected files of the folder")
        return index, [os.path.join(folder, name) for name in names]
    except NOT_READABLE as error:
        raise UserError(f"{index}: not the index of a model's shards ({error!r})") from None


def read_tensors(paths):
    """{name: tensor, as safetensors gives it} of all files."""
    safetensors = import_package("safetensors", "a Hugging Face folder")
    found = {}
    for path in paths:
        with open_input(path, HINT) as f:
            if not os.path.isfile(path):  # a device may have no end
                raise UserError(f"{path}: is no file; {HINT}")
            try:
                found |= safetensors.deserialize(f.read())
            except safetensors.SafetensorError as error:
                raise UserError(f"{path}: not a safetensors file ({error})") from None
    return found


class Weights:
    """The tensors of a folder, which `fetch` hands out; `unread` are those that it has not."""

    def __init__(self, path, tensors):
        self.path = path  # for messages
        self.tensors = tensors
        self.unread = {name for name in tensors if not UNREAD.fullmatch(name)}

    def fetch(self, name, shape):
        """A tensor in float32; raises UserError if it is missing, of another dtype or shape."""
        if name not in self.tensors:
            raise UserError(f"{self.path}: tensor {name} is missing")
        tensor = self.tensors[name]
        self.unread.discard(name)
        if tensor["dtype"] not in STORED:
            raise UserError(f"{self.path}: {name} is of {tensor['dtype']}, expected"
                            f" {', '.join(STORED)}")
        numbers = np.frombuffer(tensor["data"], STORED[tensor["dtype"]]).reshape(tensor["shape"])
        if numbers.shape != shape:
            raise UserError(f"{self.path}: {name} has shape {numbers.shape}, expected {shape} from"
                            " config.json")
        is_bfloat16 = tensor["dtype"] == "BF16"
        return bf16_to_float32(numbers) if is_bfloat16 else numbers.astype(np.float32, copy=False)


def read_hf_folder(folder, gpt2, llama):
    """(architecture, config, params) of a Hugging Face folder, without pickle. gpt2, llama: the two
    pages' classes."""
    config_path = os.path.join(folder, "config.json")
    architecture, config = read_config(config_path, gpt2, llama)
    is_llama = architecture is llama
    path, shards = shards_of(folder)
    prefix, embedding = ("model.", "embed_tokens.weight") if is_llama else ("", "wte.weight")
    weights = Weights(path, with_our_prefix(read_tensors(shards), prefix, embedding))

    shape = config.V, config.C
    wte = weights.fetch(prefix + embedding, shape)
    if "lm_head.weight" in weights.tensors:
        if not np.array_equal(weights.fetch("lm_head.weight", shape), wte):
            if not is_llama:
                raise UserError(f"{path}: lm_head.weight differs from wte.weight: this project ties"
                                " the two")
            # a head of its own is used, whatever the flag says
            config = dataclasses.replace(config, tied=0)

    table = architecture.parameter_table(config)
    described = table_elements(table)
    stored = sum(math.prod(tensor["shape"]) for tensor in weights.tensors.values())
    if described > 2 * stored + 256 * config.C:  # up to 127 rows of padding, twice
        raise UserError(f"{config_path}: describes a model of {described} weights, but {path} has"
                        f" {stored}")
    params = allocate(table)
    for name, view, order in (llama_slices if is_llama else gpt2_slices)(config, params):
        view[:] = to_ours(weights.fetch(name, to_theirs(view, order).shape), order)
    if weights.unread:
        count = len(weights.unread)
        more = f" and {count - 1} more" if count > 1 else ""
        raise UserError(f"{path}: tensor {min(weights.unread)}{more} would not be read: not a"
                        f" {architecture.TITLE} that this project trains")
    check_finite(path, params, "download or save it again")
    return architecture, config, params
