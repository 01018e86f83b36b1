"""
Weights for the trainers to start from and, by the reference in PyTorch, states for their tests.

    python export_weights.py                      # pretrained GPT-2 124M from Hugging Face
    python export_weights.py --model d12          # the same architecture with random weights from a seed, no download
    python export_weights.py --model my_gpt2/     # a Hugging Face folder (config.json, model.safetensors)

It writes
    gpt2_124M.bin                weights, float32
    gpt2_124M_bf16.bin           weights, bfloat16, which llm.c's usual build reads
    gpt2_tokenizer.bin           token id -> bytes
    gpt2_124M_debug_state.bin    for test_gpt2.py: one batch (the first tokens of the validation file), its logits, loss
                                 and gradients, the losses of ten training steps on it
in the file versions that today's llm.c reads, or with --llmc april2024 in those of April 2024 (no
bfloat16), prints the ten steps, and generates a sample. With --debug_state 0, it needs no batch,
and writes the rest.

In the other direction, --to_hf runs/mine DIR converts a run's newest model, or a .bin file, to a
Hugging Face folder, with the vocabulary of the tokenizer.bin that a run writes beside the model.
It is a benchmark, too: --write_tensors 0 --inference_only 1 --compile 1 --dtype bfloat16 and so on.
"""

import llmc  # noqa: F401  (before NumPy: it sets what OpenBLAS reads when NumPy loads it)

import argparse
import contextlib
import functools
import json
import os
import re
import sys
from types import SimpleNamespace

import numpy as np

from llmc import huggingface
from llmc.api import load_model as load_any, load_with_vocabulary
from llmc.checkpoint import without_padding, write_model
from llmc.dataloader import open_tokens
from llmc.debugstate import write_debug_state
from llmc.errors import Parser, UserError, import_package, run_main
from llmc.files import make_directory, replacing
from llmc.huggingface import LLAMA_SIZES, gpt2_slices, llama_slices, to_theirs
from llmc.resume import model_file, newest_checkpoint
from llmc.sampler import end_of_text
from llmc.tokenizer import FOLDER_FILES
from llmc.hf_tokenizer import our_tokenizer_files
from llmc.vocabulary import load_vocabulary, open_vocabulary, reason, save_vocabulary
from prepro.common import read_input
from train_gpt2 import GPT2
from train_llama3 import Llama3
from train_speedrun import Speedrun

PAGES = {GPT2: "gpt2", Llama3: "llama3", Speedrun: "speedrun"}  # what files are called
SIZES = [name for page in PAGES for name in page.SIZES]
# name -> file label
PRETRAINED = {"gpt2": "124M", "gpt2-medium": "355M", "gpt2-large": "774M", "gpt2-xl": "1558M"}
INPUT = os.path.join("data", "tiny_shakespeare_val.bin")
VOCABULARIES = {"gpt2": 50257, "bytes": 257}
VERSIONS = {  # --llmc -> the file versions that this llm.c reads (0: it has no such file)
    "today": SimpleNamespace(model=3, bf16_model=5, debug_state=2, tokenizer=2),
    "april2024": SimpleNamespace(model=1, bf16_model=0, debug_state=1, tokenizer=1),
}

# --------------------------------------------------------------------------------------------------
# weights: from and to Hugging Face's files

read_hf_folder = functools.partial(huggingface.read_hf_folder, gpt2=GPT2, llama=Llama3)


@functools.cache
def fetch_pretrained(repository):
    """Download OWNER/NAME to Hugging Face's cache (HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN work);
    return the folder."""
    files = (["model.safetensors"] if repository.startswith("openai-community/")
             else ["model*.safetensors*", "*.jinja",
                   "tokenizer*.json", "generation*"])
    hub, errors = (import_package(name, "a download")
                   for name in ("huggingface_hub", "huggingface_hub.errors"))
    try:
        return hub.snapshot_download(repository, allow_patterns=["config.json", *files])
    except errors.GatedRepoError:
        raise UserError(f"{repository}: its owner asks who downloads it: accept the license at"
                        f" https://huggingface.co/{repository}, then set HF_TOKEN to a token of"
                        " yours") from None
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled,
            OSError) as error:
        raise UserError(f"{repository}: the download from Hugging Face failed ({reason(error)});"
                        " random weights need none: python export_weights.py --model d12") from None


HF_VOCABULARY = ("vocab.json", "merges.txt", "tokenizer_config.json", "tokenizer.json",
                 "tokenizer.bin")


def write_hf_folder(model, folder, checkpoint=""):
    """Convert a checkpoint to a folder that `transformers` and others load: config, weights and
    tokenizer. Raises UserError for a folder with another vocabulary's files.

    model: a .bin file, or the directory of a run, with its checkpoint "best", "last" or a step.
    """
    architecture, config, params, tokenizer = load_with_vocabulary(model_file(model, checkpoint))
    if architecture is Speedrun:
        raise UserError(f"{model}: no class of transformers has the layers of {architecture.TITLE}")
    tokenizer_files = tokenizer_files_of(config, tokenizer) if tokenizer else {}
    others = [name for name in HF_VOCABULARY if os.path.lexists(path := os.path.join(folder, name))
              and (name not in tokenizer_files or read_input(path) != tokenizer_files[name])]
    if others:
        raise UserError(f"{folder}: has another vocabulary's {', '.join(others)}: remove that, or"
                        " name another folder")
    if newest_checkpoint(folder) is not None:
        raise UserError(f"{folder}: is the directory of a run, whose models would be hidden: name"
                        " another folder")

    make_directory(folder)
    eot = end_of_text(tokenizer, config.V)
    ends = json.loads(tokenizer_files.get("generation_config.json", "{}")).get("eos_token_id", eot)
    is_llama = architecture is Llama3
    hf = llama_hf_config(config, eot, ends) if is_llama else gpt2_hf_config(config, eot)
    of, prefix = (llama_slices, "") if is_llama else (gpt2_slices, "transformer.")
    state = {prefix + name: np.ascontiguousarray(to_theirs(view, order))
             for name, view, order in of(config, params)}
    save = import_package("safetensors.numpy", "a Hugging Face folder").save
    files = {"model.safetensors": save(state, metadata={"format": "pt"}), **tokenizer_files}
    files["config.json"] = json.dumps(hf, indent=2).encode()  # last: it makes this a model's folder

    check_nothing_hides(folder, files)
    replaced = [name for name in files if os.path.lexists(os.path.join(folder, name))]
    for name, data in files.items():
        with replacing(os.path.join(folder, name)) as f:
            f.write(data)
    print(f"wrote {', '.join(files)} to"
          f" {folder}{'; replaced ' * bool(replaced)}{', '.join(replaced)}")


def tokenizer_files_of(config, tokenizer):
    """{name: content} of a folder's files for a vocabulary: ours, those of the folder that the run
    started from, or GPT-2's."""
    found = our_tokenizer_files(config, tokenizer)
    if os.path.lexists(tokenizer.path):
        found["tokenizer.bin"] = read_input(tokenizer.path)
    # the run may have started from a folder with a tokenizer.json; a chat's has a template
    prefix = tokenizer.path.removesuffix("tokenizer.bin")
    kept = ("chat_template.jinja",) if "tokenizer.json" in found else FOLDER_FILES
    found |= {name: read_input(prefix + name) for name in kept if os.path.exists(prefix + name)}
    if "tokenizer.json" not in found and tokenizer.is_gpt2:
        try:
            found |= gpt2_tokenizer_files(config)
        except UserError as error:
            print(f"warning: no vocab.json and merges.txt: {error}", file=sys.stderr)
    return found


def check_nothing_hides(folder, files):
    """Raise UserError for another model's files in a folder, which would hide these."""
    there = [name for name in sorted(os.listdir(folder)) if name not in files and
             re.match(r"(pytorch_)?model.*\.(bin|json|safetensors)$", name)
             or name == "config.json" and read_input(os.path.join(folder, name)) != files[name]]
    if there:
        raise UserError(f"{folder}: has another model's {', '.join(there)}: remove that, or name"
                        " another folder")


def gpt2_hf_config(config, eot):
    """The config.json of a GPT-2, a dict."""
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
        "activation_function": "gelu_new", "n_positions": config.maxT, "n_ctx": config.maxT,
        "vocab_size": config.V, "n_layer": config.L, "n_head": config.NH, "n_embd": config.C,
        "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "attn_pdrop": 0.0,
        "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": eot, "eos_token_id": eot,
        "tie_word_embeddings": True,
    }  # fmt: skip


def llama_hf_config(config, bos, eos):
    """The config.json of a Llama, a dict."""
    rope = {"rope_type": "default", "rope_theta": config.theta}
    if config.factor:
        rope |= {"rope_type": "llama3", "factor": float(config.factor),
                 "low_freq_factor": float(config.low),
                 "high_freq_factor": float(config.high),
                 "original_max_position_embeddings": config.original}
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        **{theirs: getattr(config, ours) for ours, theirs in LLAMA_SIZES.items()},
        "num_key_value_heads": config.NKV, "head_dim": config.HS, "rms_norm_eps": config.eps,
        "rope_parameters": rope, "rope_theta": config.theta, "rope_scaling": rope if config.factor
        else None,
        "tie_word_embeddings": bool(config.tied), "initializer_range": 0.02, "bos_token_id": bos,
        "eos_token_id": eos,
    }  # fmt: skip


def gpt2_tokenizer_files(config):
    """Return {name: content} of vocab.json, merges.txt and tokenizer_config.json, from tiktoken's
    files for GPT-2."""
    open_vocabulary("gpt2")  # downloads both, or explains why it can't
    read = import_package("tiktoken.load", "GPT-2's vocabulary").read_file_cached
    source = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    settings = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": config.maxT,
                "eos_token": "<|endoftext|>",
                "bos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    return {
        "vocab.json": read(
            source + "encoder.json",
            "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"),
        "merges.txt": read(
            source + "vocab.bpe",
            "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
        "tokenizer_config.json": json.dumps(settings, indent=2).encode(),
    }


def load_model(name, vocabulary, checkpoint=""):
    """Load --model: (architecture, config, params, label for file names)."""
    for architecture in PAGES:
        if name in architecture.SIZES:
            return architecture, *architecture.random_model(name, VOCABULARIES[vocabulary]), name
    if name in PRETRAINED:
        return *read_hf_folder(fetch_pretrained(f"openai-community/{name}")), PRETRAINED[name]
    if os.path.exists(name):
        label = os.path.basename(os.path.abspath(name)).removesuffix(".bin")
        return *load_any(name, checkpoint), re.sub(f"^({'|'.join(PAGES.values())})_", "", label)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return *read_hf_folder(fetch_pretrained(name)), name.partition("/")[2]
    raise UserError(f"--model {name}: expected one of {', '.join([*PRETRAINED, *SIZES])}, a"
                    " model of Hugging Face (OWNER/NAME) or its folder, the directory of a run or"
                    " a .bin file")


# --------------------------------------------------------------------------------------------------
# files, and a run on one batch


def first_batch(path, V, B, T):
    """Return x, y (B, T) int32 from the first B*T+1 tokens of a token file; y holds the token after
    each in x."""
    tokens = np.array(open_tokens(path, V, B * T + 1)[: B * T + 1], np.int32)
    return tokens[:-1].reshape(B, T), tokens[1:].reshape(B, T)


def write_files(args, architecture, config, params, label, reference, batch, vocabulary):
    """Write the models, the tokenizer and, if `batch` is not None, the debug state; returns the
    model trained on the batch, or None."""
    versions = VERSIONS[args.llmc]
    family = PAGES[architecture]
    if label == "tokenizer":
        raise UserError(f"--model {args.model}: its weights would be gpt2_tokenizer.bin, as"
                        " GPT-2's vocabulary is: rename it")
    if vocabulary and versions.tokenizer == 1 and vocabulary.eot != VOCABULARIES["gpt2"] - 1:
        raise UserError(f"--llmc {args.llmc}: that program expects end of text at token 50256,"
                        f" which is {vocabulary.eot} in this vocabulary: leave --llmc out, or use"
                        " GPT-2's vocabulary")
    prefix = os.path.join(args.output_dir, f"{family}_{label}")
    models = {f"{prefix}.bin": versions.model, f"{prefix}_bf16.bin": versions.bf16_model}
    models = {path: version for path, version in models.items() if version}
    state_path = f"{prefix}_debug_state.bin"
    for path, version in models.items():
        check_not_read(args.model, path, version)
    make_directory(args.output_dir)
    written = [*models]
    model = None
    for path, version in models.items():
        write_model(path, config, params, version)
    if batch is not None:
        report = reference.print_iteration
        state, model = reference.make_debug_state(config, params, *batch, args.num_iterations,
                                                  report)
        write_debug_state(state_path, config, state, 3 if architecture is Llama3
                          else versions.debug_state)
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
            raise UserError(f"{path}: is --model itself, of version {found}, and would become"
                            f" version {version}: pass --output_dir with another directory")


def vocabulary_of(model, vocabulary, config, label):
    """Return that of --vocabulary for random weights, else GPT-2's for OpenAI's models, else that
    of the files beside the model; None, with a warning, if there is none or loading it fails. Its
    file is found by its `name`."""
    try:
        if model in PRETRAINED or model in SIZES:
            label = "gpt2" if model in PRETRAINED else vocabulary
            found = open_vocabulary(label)
        else:
            model = model if os.path.exists(model) else fetch_pretrained(model)
            found = load_vocabulary(model, config.V)
        if found:
            found.check_file()
            found.name = "gpt2" if found.is_gpt2 else label
        return found
    except UserError as error:
        print(f"warning: no tokenizer file: {error}", file=sys.stderr)
        return None


def add_run_flags(parser):
    """Add the flags of a run on one batch; returns the group of those for benchmarks alone."""
    group = parser.add_argument_group("batch", "for the debug state and --write_tensors 0")
    group.add_argument("--input", default=INPUT,
                       help="token file of the batch")
    group.add_argument("--num_iterations", type=int, default=10, help="steps on the batch")
    group.add_argument("--batch_size", type=int, default=4, help="B")
    group.add_argument("--sequence_length", type=int, default=argparse.SUPPRESS,
                       help="T (default: 64, at most the model's longest sequence)")
    group = parser.add_argument_group(
        "benchmark", "for --write_tensors 0: files always come from a float32 run on the CPU")
    group.add_argument("--inference_only", type=int, choices=(0, 1), default=0,
                       help="1: forward passes only")
    group.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32",
                       help="bfloat16, float16: autocast")
    group.add_argument("--compile", type=int, choices=(0, 1), default=0, help="torch.compile")
    group.add_argument("--tensorcores", type=int, choices=(0, 1), default=0,
                       help="TF32 matmuls on a GPU")
    group.add_argument("--flash", type=int, choices=(0, 1), default=0,
                       help="F.scaled_dot_product_attention, which the others always use")
    group.add_argument("--device", default="auto",
                       help="cpu, cuda, mps; auto: a GPU when there is one")
    return group


def parse_arguments():
    parser = Parser(__doc__)
    group = parser.add_argument_group("what")
    group.add_argument("--model", default="gpt2", metavar="NAME",
                       help=f"{', '.join(PRETRAINED)} (download), {', '.join(SIZES)} (random"
                            " weights), a model of Hugging Face (OWNER/NAME), its folder (./gpt2"
                            " for one of that name), the directory of a run or a .bin file")
    group.add_argument("--vocabulary", choices=tuple(VOCABULARIES), default="gpt2",
                       help="of a model with random weights")
    group.add_argument("--output_dir", default=".", help="directory of the files")
    group.add_argument("--to_hf", nargs=2, metavar=("MODEL", "DIR"),
                       help="write a run's model or a .bin file as a Hugging Face folder, and exit")
    group.add_argument("--checkpoint", metavar="best|last|N", default="",
                       help="of a run; N: of step N (default: the best where --patience kept it,"
                       " else the last)")
    group.add_argument("--llmc", choices=tuple(VERSIONS), default="today",
                       help="which llm.c reads the files: today's, or its program of April 2024"
                       " (no bfloat16)")
    group.add_argument("--debug_state", type=int, choices=(0, 1), default=argparse.SUPPRESS,
                       help="1: train on a batch, too, and write its results for test_gpt2.py"
                       " (default: 1 if there is an --input with the model's vocabulary)")
    group.add_argument("--write_tensors", type=int, choices=(0, 1), default=1,
                       help="0: write no files, run a benchmark on one batch")
    benchmark = add_run_flags(parser)
    args = parser.parse_args()
    for name, least in (("num_iterations", 0), ("batch_size", 1), ("sequence_length", 1)):
        if getattr(args, name, least) < least:
            raise UserError(f"--{name} {getattr(args, name)}: expected at least {least}")
    if args.to_hf or args.write_tensors:
        others = parser._actions if args.to_hf else benchmark._group_actions
        # would make other files
        unlike = ("model", "vocabulary", "output_dir", "llmc", "write_tensors", "dtype")
        why = ("with --to_hf MODEL DIR" if args.to_hf
               else "on files: it is for benchmarks, --write_tensors 0")
        for action in others:
            value = getattr(args, action.dest, action.default)
            if value == action.default or action.dest in ("to_hf", "checkpoint"):
                continue
            message = f"{action.option_strings[0]} {value}: has no effect {why}"
            if action.dest in unlike:
                raise UserError(message)
            print(f"note: {message}", file=sys.stderr)
    return args


def import_reference():
    """reference.py, which only a run on a batch needs."""
    import_package("torch", "a run on a batch")
    import reference

    return reference


def main():
    args = parse_arguments()
    if args.to_hf:
        return write_hf_folder(*args.to_hf, args.checkpoint)
    architecture, config, params, label = load_model(args.model, args.vocabulary, args.checkpoint)
    if args.vocabulary != "gpt2" and config.V != VOCABULARIES[args.vocabulary]:
        raise UserError(f"--vocabulary {args.vocabulary}: {args.model} has another one, of"
                        f" V={config.V}: leave it out")
    B = args.batch_size
    T = getattr(args, "sequence_length", min(64, config.maxT))
    if T > config.maxT:
        raise UserError(f"--sequence_length {T}: the model's longest sequence is {config.maxT}")
    vocabulary = vocabulary_of(args.model, args.vocabulary, config, label)
    if vocabulary:
        config = without_padding(config, params, len(vocabulary.tokens))
    batch = None
    given = getattr(args, "debug_state", None)
    if architecture is not GPT2 and args.llmc != "today":
        raise UserError(f"--llmc {args.llmc}: it reads no model but GPT-2: leave --llmc out")
    if given != 0 or not args.write_tensors:
        try:
            batch = first_batch(args.input, config.V, B, T)
            import_reference()
        except UserError as error:
            if given or not args.write_tensors or args.input != INPUT:
                raise
            batch = None
            print("note: no debug state, which is for test_gpt2.py, and needs PyTorch, and --input"
                  f" TOKENS_val.bin of the model's vocabulary: {error}", file=sys.stderr)
    reference = import_reference() if batch else None
    print(f"model {args.model}: {config.describe()}{reference.describe() if batch else ''}")
    with reference.torch_errors_as_lines() if batch else contextlib.nullcontext():
        if args.write_tensors:
            model = write_files(args, architecture, config, params, label, reference, batch,
                                vocabulary)
        else:
            model = reference.run_benchmark(args, config, params, *batch)
        if vocabulary and model:
            reference.print_sample(model, vocabulary)


if __name__ == "__main__":
    run_main(main)
