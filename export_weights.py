"""
The reference GPT-2, in PyTorch: weights for the trainers to start from, and states for their tests.

    python export_weights.py                      # pretrained GPT-2 124M from Hugging Face
    python export_weights.py --model d12          # the same architecture with random weights from a seed, no download
    python export_weights.py --model my_gpt2/     # a Hugging Face folder (config.json, model.safetensors)

It writes
    gpt2_124M.bin                weights, float32
    gpt2_124M_bf16.bin           weights, bfloat16, which llm.c's usual build reads
    gpt2_tokenizer.bin           token id -> bytes
    gpt2_124M_debug_state.bin    for test_gpt2.py: one batch (the first tokens of the validation file), its logits, loss
                                 and gradients, the losses of ten training steps on it
in the file versions that today's llm.c reads, or with --llmc april2024 in those of April 2024 (no bfloat16), prints the
ten steps, and generates a sample. With --debug_state 0, it needs no batch, and writes the rest.

In the other direction, --to_hf runs/mine DIR converts a run's newest model, or a .bin file, to a Hugging Face folder,
with the vocabulary of the tokenizer.bin that a run writes beside the model.
It is a benchmark, too: --write_tensors 0 --inference_only 1 --compile 1 --dtype bfloat16 and so on.
"""

import llmc  # noqa: F401  (before NumPy: it sets what OpenBLAS reads when NumPy loads it)

import argparse
import contextlib
import functools
import json
import math
import os
import re
import sys
import time
from types import SimpleNamespace

import numpy as np

try:
    import safetensors.torch
    import tiktoken.load
    import torch
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
    from torch import nn
    from torch.nn import functional as F
except ImportError as error:
    sys.exit(f"export_weights.py: error: {error.name} cannot be imported: pip install -r requirements.txt")

from llmc import huggingface
from llmc.api import load_model as load_any, load_with_vocabulary
from llmc.checkpoint import without_padding, write_model
from llmc.dataloader import open_tokens
from llmc.debugstate import DebugState, fingerprint, write_debug_state
from llmc.errors import Parser, UserError, run_main
from llmc.files import make_directory, replacing
from llmc.huggingface import LLAMA_SIZES, TRANSPOSED, gpt2_slices, llama_slices, neighbors
from llmc.resume import model_file, newest_checkpoint
from llmc.sampler import end_of_text
from llmc.tensors import allocate
from llmc.tokenizer import FOLDER_FILES
from llmc.vocabulary import EOT, bytes_to_letters, load_vocabulary, open_vocabulary, reason, save_vocabulary
from prepro.common import read_input
from train_gpt2 import GPT2, Config
from train_llama3 import Llama3, rope_table

PRETRAINED = {"gpt2": "124M", "gpt2-medium": "355M", "gpt2-large": "774M", "gpt2-xl": "1558M"}  # name -> file label
INPUT = os.path.join("data", "tiny_shakespeare_val.bin")
VOCABULARIES = {"gpt2": 50257, "bytes": 257}
VERSIONS = {  # --llmc -> the file versions that this llm.c reads (0: it has no such file)
    "today": SimpleNamespace(model=3, bf16_model=5, debug_state=2, tokenizer=2),
    "april2024": SimpleNamespace(model=1, bf16_model=0, debug_state=1, tokenizer=1),
}
LLMC_LLAMA_TEST = dict(learning_rate=1e-5, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0)
ADAMW = dict(learning_rate=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)

# ----------------------------------------------------------------------------------------------------------------------
# the model. Language Models are Unsupervised Multitask Learners, Radford et al. 2019. The names are Hugging Face's.


class Attention(nn.Module):
    """Causal self-attention, (B, T, C) -> (B, T, C)."""

    def __init__(self, config, flash):
        super().__init__()
        self.NH, self.flash = config.NH, flash
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


class ReferenceGPT2(nn.Module):
    """GPT-2 for PyTorch's autograd; with `flash`, attention is F.scaled_dot_product_attention."""

    def __init__(self, config, flash=False):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.V, config.C)
        self.wpe = nn.Embedding(config.maxT, config.C)
        self.h = nn.ModuleList(Block(config, flash) for _ in range(config.L))
        self.ln_f = nn.LayerNorm(config.C)

    def forward(self, inputs, targets=None):
        """inputs (B, T) -> (logits (B, T, V), mean loss); without targets -> (the last position's (B, 1, V), None)."""
        x = self.wte(inputs) + self.wpe(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x if targets is not None else x[:, -1:])
        logits = F.linear(x, self.wte.weight)  # the classifier is tied to the embedding
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class RMSNorm(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(config.C)), config.eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class LlamaAttention(nn.Module):
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
        heads = F.scaled_dot_product_attention(query, *(part.repeat_interleave(NH // NKV, 1) for part in (
            key, value)), is_causal=True)
        return self.o_proj(heads.transpose(1, 2).reshape(B, T, NH * HS))


def rotations(config, T, dtype):
    """cos and sin (T, HS) of RoPE, for Hugging Face's halves."""
    return (torch.from_numpy(np.concatenate((part, part), 1)).to(dtype) for part in rope_table(config, T))


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
        self.input_layernorm, self.self_attn = RMSNorm(config), LlamaAttention(config)
        self.post_attention_layernorm, self.mlp = RMSNorm(config), LlamaMLP(config)

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
        logits = F.linear(self.model.norm(x), self.head())
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def generate(model, tokens, length, generator, top_k=40):
    """Append `length` sampled tokens to tokens (1, T)."""
    for _ in range(length):
        logits = model(tokens[:, -model.config.maxT :])[0][:, -1].float()
        best, ids = logits.topk(min(top_k, logits.shape[-1]))
        choice = torch.multinomial(best.softmax(dim=-1), 1, generator=generator)
        tokens = torch.cat((tokens, ids.gather(1, choice)), dim=1)
    return tokens


# ----------------------------------------------------------------------------------------------------------------------
# weights: conversions between our 16 stacked tensors, the reference's modules and Hugging Face's files

read_hf_folder = functools.partial(huggingface.read_hf_folder, gpt2=GPT2, llama=Llama3)


def module_slices(config, tensors):
    """Yield (module's name, NumPy view, heads) for every parameter of the reference, as llama_slices does."""
    if not isinstance(config, Config):
        return llama_slices(config, tensors)
    return ((module_name, view, 0) for _, module_name, view in gpt2_slices(config, tensors))


def to_reference(config, params, flash=False, dtype=torch.float32):
    """Return a ReferenceGPT2, or a ReferenceLlama, on the CPU with our parameters."""
    with torch.device("meta"):
        model = ReferenceGPT2(config, flash) if isinstance(config, Config) else ReferenceLlama(config)
    state = {name: torch.from_numpy(np.array(halves(view, heads))).to(dtype)
             for name, view, heads in module_slices(config, params)}
    model.load_state_dict(state, assign=True)
    return model


def collect_gradients(config, model, dtype="float32"):
    """Return the reference's gradients in our layout; padding is 0."""
    table = (GPT2 if isinstance(config, Config) else Llama3).parameter_table(config, dtype)
    tensors, parameters = allocate(table), dict(model.named_parameters())
    for name, view, heads in module_slices(config, tensors):
        view[...] = neighbors(parameters[name].grad.numpy(), heads)
    return tensors


def halves(weight, heads):
    """The inverse of `neighbors`: our order of rows -> Hugging Face's."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape) if heads else weight


@functools.cache
def fetch_pretrained(repository):
    """Download OWNER/NAME to Hugging Face's cache (HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN work); return the folder."""
    files = ["model.safetensors"] if repository.startswith("openai-community/") else ["model*.safetensors*", "*.jinja",
                                                                                      "tokenizer*.json", "generation*"]
    try:
        return snapshot_download(repository, allow_patterns=["config.json", *files])
    except GatedRepoError:
        raise UserError(f"{repository}: its owner asks who downloads it: accept the license at"
                        f" https://huggingface.co/{repository}, then set HF_TOKEN to a token of yours") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise UserError(f"{repository}: the download from Hugging Face failed ({reason(error)}); random weights"
                        " need none: python export_weights.py --model d12") from None


HF_VOCABULARY = "vocab.json", "merges.txt", "tokenizer_config.json", "tokenizer.json", "tokenizer.bin"


def write_hf_folder(model, folder):
    """Convert a checkpoint to a folder that `transformers` and others load: config, weights and tokenizer. Raises
    UserError for a folder with another vocabulary's files.

    model: a .bin file, or the directory of a run.
    """
    model_path = model_file(model)
    (architecture, config, params, tokenizer), tokenizer_files = load_with_vocabulary(model_path), {}
    if tokenizer:
        tokenizer_files = our_tokenizer_files(config, tokenizer)
        if os.path.lexists(tokenizer.path):
            tokenizer_files["tokenizer.bin"] = read_input(tokenizer.path)
        if "tokenizer.json" not in tokenizer_files:  # the run may have started from a folder with one
            beside = {name: tokenizer.path.removesuffix("tokenizer.bin") + name for name in FOLDER_FILES}
            tokenizer_files |= {name: read_input(path) for name, path in beside.items() if os.path.exists(path)}
        if "tokenizer.json" not in tokenizer_files and tokenizer.is_gpt2:
            try:
                tokenizer_files |= gpt2_tokenizer_files(config)
            except UserError as error:
                print(f"warning: no vocab.json and merges.txt: {error}", file=sys.stderr)
    others = [name for name in HF_VOCABULARY if os.path.lexists(path := os.path.join(folder, name))
              and (name not in tokenizer_files or read_input(path) != tokenizer_files[name])]
    if others:
        raise UserError(f"{folder}: has another vocabulary's {', '.join(others)}: remove that, or name another folder")
    if newest_checkpoint(folder) is not None:
        raise UserError(f"{folder}: is the directory of a run, whose models would be hidden: name another folder")
    make_directory(folder)
    eot = end_of_text(tokenizer, config.V)
    ends = json.loads(tokenizer_files.get("generation_config.json", "{}")).get("eos_token_id", eot)
    hf = llama_hf_config(config, eot, ends) if architecture is Llama3 else {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
        "n_positions": config.maxT, "n_ctx": config.maxT, "vocab_size": config.V, "n_layer": config.L,
        "n_head": config.NH, "n_embd": config.C, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02,
        "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": eot, "eos_token_id": eot,
        "tie_word_embeddings": True,
    }  # fmt: skip
    if architecture is Llama3:
        state = {name: halves(view, heads) for name, view, heads in llama_slices(config, params)}
    else:
        state = {f"transformer.{module_name}": view.T if name in TRANSPOSED else view
                 for name, module_name, view in gpt2_slices(config, params)}
    state = {name: torch.from_numpy(np.ascontiguousarray(view)) for name, view in state.items()}
    files = {"model.safetensors": safetensors.torch.save(state, metadata={"format": "pt"}), **tokenizer_files,
             "config.json": json.dumps(hf, indent=2).encode()}  # last: it makes this a Hugging Face folder
    there = [name for name in sorted(os.listdir(folder)) if name not in files and  # and these would hide our weights
             re.match(r"(pytorch_)?model.*\.(bin|json|safetensors)$", name)
             or name == "config.json" and read_input(os.path.join(folder, name)) != files[name]]
    if there:
        raise UserError(f"{folder}: has another model's {', '.join(there)}: remove that, or name another folder")
    replaced = [name for name in files if os.path.lexists(os.path.join(folder, name))]
    for name, data in files.items():
        with replacing(os.path.join(folder, name)) as f:
            f.write(data)
    print(f"wrote {', '.join(files)} to {folder}{'; replaced ' * bool(replaced)}{', '.join(replaced)}")


def llama_hf_config(config, bos, eos):
    """The config.json of a Llama, a dict."""
    rope = {"rope_type": "default", "rope_theta": config.theta}
    if config.factor:
        rope |= {"rope_type": "llama3", "factor": float(config.factor), "low_freq_factor": float(config.low),
                 "high_freq_factor": float(config.high), "original_max_position_embeddings": config.original}
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False,
        "mlp_bias": False, **{theirs: getattr(config, ours) for ours, theirs in LLAMA_SIZES.items()},
        "num_key_value_heads": config.NKV, "head_dim": config.HS, "rms_norm_eps": config.eps,
        "rope_parameters": rope, "rope_theta": config.theta, "rope_scaling": rope if config.factor else None,
        "tie_word_embeddings": bool(config.tied), "initializer_range": 0.02, "bos_token_id": bos, "eos_token_id": eos,
    }  # fmt: skip


def our_tokenizer_files(config, tokenizer):
    """Return {name: content} of tokenizer.json, for Hugging Face's `tokenizers`, and tokenizer_config.json.

    A vocabulary of bytes or characters becomes a byte-pair encoding without merges; any other gives {}.
    """
    ids = {token: id for id, token in enumerate(tokenizer.tokens) if id != tokenizer.eot}
    letters = {token: token.decode(errors="replace") for token in ids}
    byte_level, decoder = None, {"type": "Fuse"}
    if len(ids) == 256 and all(len(token) == 1 for token in ids):
        byte_level = decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
                                "use_regex": False}
        letters = {bytes([byte]): letter for byte, letter in bytes_to_letters().items()}
    elif not all(len(letter) == 1 and letter.encode() == token for token, letter in letters.items()):
        return {}
    special = {"id": tokenizer.eot, "content": EOT, "single_word": False, "lstrip": False, "rstrip": False,
               "normalized": False, "special": True}
    vocabulary = {letters[token]: id for token, id in ids.items()} | {EOT: tokenizer.eot}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
             "vocab": vocabulary, "merges": []}
    tokenizer_json = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [special],
                      "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": decoder,
                      "model": model}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.maxT, "eos_token": EOT,
                "bos_token": EOT, "clean_up_tokenization_spaces": False}
    return {"tokenizer.json": json.dumps(tokenizer_json, indent=1).encode(),
            "tokenizer_config.json": json.dumps(settings, indent=2).encode()}


def gpt2_tokenizer_files(config):
    """Return {name: content} of vocab.json, merges.txt and tokenizer_config.json, from tiktoken's files for GPT-2."""
    open_vocabulary("gpt2")  # downloads both, or explains why it can't
    source = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    settings = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": config.maxT, "eos_token": "<|endoftext|>",
                "bos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    return {
        "vocab.json": tiktoken.load.read_file_cached(
            source + "encoder.json", "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"),
        "merges.txt": tiktoken.load.read_file_cached(
            source + "vocab.bpe", "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
        "tokenizer_config.json": json.dumps(settings, indent=2).encode(),
    }


def load_model(name, vocabulary):
    """Load --model: (architecture, config, params, label for file names)."""
    for architecture in (GPT2, Llama3):
        if name in architecture.SIZES:
            return architecture, *architecture.random_model(name, VOCABULARIES[vocabulary]), name
    if name in PRETRAINED:
        return *read_hf_folder(fetch_pretrained(f"openai-community/{name}")), PRETRAINED[name]
    if os.path.exists(name):
        is_folder = os.path.exists(os.path.join(name, "config.json"))
        label = os.path.basename(os.path.abspath(name if is_folder else model_file(name))).removesuffix(".bin")
        return *load_any(name), label.removeprefix("gpt2_").removeprefix("llama3_")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return *read_hf_folder(fetch_pretrained(name)), name.partition("/")[2]
    raise UserError(f"--model {name}: expected one of {', '.join([*PRETRAINED, *GPT2.SIZES, *Llama3.SIZES])}, a"
                    " model of Hugging Face (OWNER/NAME) or its folder, the directory of a run or a .bin file")


# ----------------------------------------------------------------------------------------------------------------------
# the run on one batch


def first_batch(path, V, B, T):
    """Return x, y (B, T) int32 from the first B*T+1 tokens of a token file; y holds the token after each in x."""
    tokens = np.array(open_tokens(path, V, B * T + 1)[: B * T + 1], np.int32)
    return tokens[:-1].reshape(B, T), tokens[1:].reshape(B, T)


def adamw(model, settings, **options):
    return torch.optim.AdamW(model.parameters(), lr=settings["learning_rate"],
                             betas=(settings["beta1"], settings["beta2"]), eps=settings["eps"],
                             weight_decay=settings["weight_decay"], **options)


def overfit(model, x, y, iterations, settings, autocast=contextlib.nullcontext, capture=None, report=None, norms=None):
    """Train on one batch; returns the loss of each iteration, before its update. norms: a list, for those of the
    gradients, which are then clipped to 1.

    capture(logits, loss) is called once, after the first backward pass; report(iteration, loss, seconds) after each
    update.
    """
    optimizer, losses = adamw(model, settings), []
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


def run_inference(model, x, y, iterations, autocast):
    for iteration in range(iterations):
        start = time.perf_counter()
        with torch.no_grad(), autocast():
            loss = model(x, y)[1].item()
        print_iteration(iteration, loss, time.perf_counter() - start)


def make_debug_state(config, params, x, y, iterations, report=None):
    """Train in float32 on the CPU, on one batch, for the parity test; returns (DebugState, trained model)."""
    model, state = to_reference(config, params), {}

    def capture(logits, loss):
        state.update(logits=logits.detach().numpy(), loss=loss.item(), grads=collect_gradients(config, model))

    x_long, y_long = (torch.from_numpy(ids).long() for ids in (x, y))
    losses = overfit(model, x_long, y_long, iterations, ADAMW, capture=capture, report=report)
    if not iterations:
        logits, loss = model(x_long, y_long)
        loss.backward()
        capture(logits, loss)
    history, norms = None, []
    if not isinstance(config, Config):
        history = overfit(to_reference(config, params), x_long, y_long, iterations, LLMC_LLAMA_TEST, norms=norms), norms
    state = DebugState(x, y, **state, optimizer=ADAMW, losses=np.array(losses, np.float32),
                       crc=fingerprint(config, params), history=history and np.array(history, np.float32))
    return state, model


def write_files(args, architecture, config, params, label, batch, vocabulary):
    """Write the models, the tokenizer and, if `batch` is not None, the debug state; returns the model trained on the
    batch, or None."""
    versions, family = VERSIONS[args.llmc], "llama3" if architecture is Llama3 else "gpt2"
    if label == "tokenizer":
        raise UserError(f"--model {args.model}: its weights would be gpt2_tokenizer.bin, as GPT-2's vocabulary is:"
                        " rename it")
    if vocabulary and versions.tokenizer == 1 and vocabulary.eot != VOCABULARIES["gpt2"] - 1:
        raise UserError(f"--llmc {args.llmc}: that program expects end of text at token 50256, which is"
                        f" {vocabulary.eot} in this vocabulary: leave --llmc out, or use GPT-2's vocabulary")
    prefix = os.path.join(args.output_dir, f"{family}_{label}")
    models = {f"{prefix}.bin": versions.model, f"{prefix}_bf16.bin": versions.bf16_model}
    models = {path: version for path, version in models.items() if version}
    state_path = f"{prefix}_debug_state.bin"
    for path, version in models.items():
        check_not_read(args.model, path, version)
    make_directory(args.output_dir)
    written, model = [*models], None
    for path, version in models.items():
        write_model(path, config, params, version)
    if batch is not None:
        state, model = make_debug_state(config, params, *batch, args.num_iterations, print_iteration)
        write_debug_state(state_path, config, state, 3 if architecture is Llama3 else versions.debug_state)
        written.append(state_path)
    if vocabulary:
        written.append(os.path.join(args.output_dir, f"{vocabulary.name}_tokenizer.bin"))
        save_vocabulary(written[-1], vocabulary, versions.tokenizer)
    for path in written:
        print(f"wrote {path}")
    return model


def check_not_read(model, path, version):
    """Raise UserError if writing `path` would overwrite --model's own file with another version."""
    if os.path.isfile(model) and os.path.exists(path) and os.path.samefile(model, path):
        found = int(np.fromfile(path, "<i4", 2)[1])
        if found != version:  # the same version would write the same weights
            raise UserError(f"{path}: is --model itself, of version {found}, and would become version {version}:"
                            " pass --output_dir with another directory")


def run_benchmark(args, config, params, x, y):
    """Run the same steps with the benchmark flags; returns the model."""
    device = choose_device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = bool(args.tensorcores)
    model = to_reference(config, params, bool(args.flash)).to(device)
    step_model = torch.compile(model) if args.compile else model
    dtype = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[args.dtype]
    autocast = functools.partial(torch.autocast, torch.device(device).type, dtype, enabled=dtype is not None)
    x, y = (torch.from_numpy(ids).long().to(device) for ids in (x, y))
    if args.inference_only:
        run_inference(step_model, x, y, args.num_iterations, autocast)
    else:
        overfit(step_model, x, y, args.num_iterations, ADAMW, autocast, report=print_iteration)
    return model


def print_iteration(iteration, loss, seconds):
    print(f"iteration {iteration}, loss: {loss:.6f}, time: {seconds * 1000:.3f} ms", flush=True)


def vocabulary_of(model, vocabulary, config, label):
    """Return that of --vocabulary for random weights, else GPT-2's for OpenAI's models, else that of the files beside
    the model; None, with a warning, if there is none or loading it fails. Its file is found by its `name`."""
    try:
        if model in PRETRAINED or model in GPT2.SIZES or model in Llama3.SIZES:
            label = "gpt2" if model in PRETRAINED else vocabulary
            found = open_vocabulary(label)
        else:
            model = model if os.path.exists(model) else fetch_pretrained(model)
            found = load_vocabulary(model if os.path.exists(os.path.join(model, "config.json")) else model_file(model),
                                    config.V)
        if found:
            found.check_file()
            found.name = "gpt2" if found.is_gpt2 else label
        return found
    except UserError as error:
        print(f"warning: no tokenizer file: {error}", file=sys.stderr)
        return None


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


def parse_arguments():
    parser = Parser(description=(__doc__ or "").strip().split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    group = parser.add_argument_group("what")
    group.add_argument("--model", default="gpt2", metavar="NAME",
                       help=f"{', '.join(PRETRAINED)} (download), {', '.join([*GPT2.SIZES, *Llama3.SIZES])} (random"
                            " weights), a model of Hugging Face (OWNER/NAME), its folder (./gpt2 for one of that name),"
                            " the directory of a run or a .bin file")
    group.add_argument("--vocabulary", choices=tuple(VOCABULARIES), default="gpt2",
                       help="of a model with random weights")
    group.add_argument("--output_dir", default=".", help="directory of the files")
    group.add_argument("--to_hf", nargs=2, metavar=("MODEL", "DIR"),
                       help="write a run's newest model, or a .bin file, as a Hugging Face folder, and exit")
    group.add_argument("--llmc", choices=tuple(VERSIONS), default="today",
                       help="which llm.c reads the files: today's, or its program of April 2024 (no bfloat16)")
    group.add_argument("--debug_state", type=int, choices=(0, 1), default=argparse.SUPPRESS,
                       help="1: train on a batch, too, and write its results for test_gpt2.py (default: 1 if there is"
                       " an --input with the model's vocabulary)")
    group.add_argument("--write_tensors", type=int, choices=(0, 1), default=1,
                       help="0: write no files, run a benchmark on one batch")
    group = parser.add_argument_group("batch", "for the debug state and --write_tensors 0")
    group.add_argument("--input", default=INPUT,
                       help="token file of the batch")
    group.add_argument("--num_iterations", type=int, default=10, help="steps on the batch")
    group.add_argument("--batch_size", type=int, default=4, help="B")
    group.add_argument("--sequence_length", type=int, default=argparse.SUPPRESS,
                       help="T (default: 64, at most the model's longest sequence)")
    benchmark = group = parser.add_argument_group(
        "benchmark", "for --write_tensors 0: files always come from a float32 run on the CPU")
    group.add_argument("--inference_only", type=int, choices=(0, 1), default=0, help="1: forward passes only")
    group.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32",
                       help="bfloat16, float16: autocast")
    group.add_argument("--compile", type=int, choices=(0, 1), default=0, help="torch.compile")
    group.add_argument("--tensorcores", type=int, choices=(0, 1), default=0, help="TF32 matmuls on a GPU")
    group.add_argument("--flash", type=int, choices=(0, 1), default=0,
                       help="F.scaled_dot_product_attention, which Llama 3 always uses")
    group.add_argument("--device", default="auto", help="cpu, cuda, mps; auto: a GPU when there is one")
    args = parser.parse_args()
    for name, least in (("num_iterations", 0), ("batch_size", 1), ("sequence_length", 1)):
        if getattr(args, name, least) < least:
            raise UserError(f"--{name} {getattr(args, name)}: expected at least {least}")
    if args.to_hf or args.write_tensors:
        others = parser._actions if args.to_hf else benchmark._group_actions
        unlike = ("model", "vocabulary", "output_dir", "llmc", "write_tensors", "dtype")  # would make other files
        why = "with --to_hf MODEL DIR" if args.to_hf else "on files: it is for benchmarks, --write_tensors 0"
        for action in others:
            value = getattr(args, action.dest, action.default)
            if value == action.default or action.dest == "to_hf":
                continue
            message = f"{action.option_strings[0]} {value}: has no effect {why}"
            if action.dest in unlike:
                raise UserError(message)
            print(f"note: {message}", file=sys.stderr)
    return args


@contextlib.contextmanager
def torch_errors_as_lines():
    """Turn PyTorch's RuntimeErrors (out of memory, no C++ compiler for --compile) into UserErrors of one line."""
    try:
        yield
    except RuntimeError as error:
        raise UserError(f"PyTorch: {next(iter(str(error).splitlines()), type(error).__name__)}") from None


@torch_errors_as_lines()
def main():
    args = parse_arguments()
    if args.to_hf:
        return write_hf_folder(*args.to_hf)
    architecture, config, params, label = load_model(args.model, args.vocabulary)
    if args.vocabulary != "gpt2" and config.V != VOCABULARIES[args.vocabulary]:
        raise UserError(f"--vocabulary {args.vocabulary}: {args.model} has another one, of V={config.V}: leave it out")
    B, T = args.batch_size, getattr(args, "sequence_length", min(64, config.maxT))
    if T > config.maxT:
        raise UserError(f"--sequence_length {T}: the model's longest sequence is {config.maxT}")
    vocabulary = vocabulary_of(args.model, args.vocabulary, config, label)
    if vocabulary:
        config = without_padding(config, params, len(vocabulary.tokens))
    batch, given = None, getattr(args, "debug_state", None)
    if architecture is Llama3 and args.llmc != "today":
        raise UserError(f"--llmc {args.llmc}: it reads no Llama 3: leave --llmc out")
    if given != 0 or not args.write_tensors:
        try:
            batch = first_batch(args.input, config.V, B, T)
        except UserError:
            if given or not args.write_tensors or args.input != INPUT:
                raise
            print("note: no debug state: it is for test_gpt2.py, and needs --input TOKENS_val.bin of the model's"
                  " vocabulary", file=sys.stderr)
    on = f", PyTorch {torch.__version__}, {torch.get_num_threads()} threads" if batch else ""
    print(f"model {args.model}: {config.describe()}{on}")
    if args.write_tensors:
        model = write_files(args, architecture, config, params, label, batch, vocabulary)
    else:
        model = run_benchmark(args, config, params, *batch)
    if vocabulary and model:
        print_sample(model, vocabulary)


if __name__ == "__main__":
    run_main(main)
