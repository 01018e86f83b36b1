"""HellaSwag's file and accuracy, --hellaswag of the trainers, evaluate.py; the numbers of
transformers."""

import dataclasses
import hashlib
import json
import math
import re
import shutil
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest

import evaluate
import export_weights
import train_gpt2
from conftest import SMALL, SMALL_HEADS, Server, random_params
from llmc.checkpoint import read_model, write_model
from llmc.dataloader import write_tokens
from llmc.errors import UserError
from llmc.hellaswag import Example, load_examples
from llmc.settings import Settings
from llmc.tokenizer import write_tokenizer
from llmc.vocabulary import open_vocabulary
from prepro import hellaswag, mmlu
from prepro.hellaswag import write_examples

HELLASWAG = "data/hellaswag_val.bin"
TOKENIZER = "--tokenizer", "gpt2_tokenizer.bin"
ALL = "--data", "data/tiny_shakespeare", "--hellaswag", HELLASWAG, *TOKENIZER
FLAGS = ("-x", 4, "-b", 2, "-t", 32, "-v", 2, "-s", 0)
LINES = ('{"ind": 24, "ctx": "A man. he", "label": 3, "endings": ["is off.", "holds a rubik\'s'
         ' cube.", "b", "a"]}\n\n{"ctx": "The sun", "label": "0", "endings": ["rises.", "sets.",'
         ' "b", "a"]}\n')


@pytest.fixture
def results(run_here):
    """results(flag, ...): what evaluate.py finds, a dict."""
    return lambda *flags: json.loads(run_here(evaluate, *flags, "--json").stdout)


@pytest.fixture
def examples(workplace):
    """60 of random tokens, of any lengths that fit, which data/hellaswag_val.bin has in a
    workplace."""
    def ids(low, high):
        return rng.integers(0, SMALL.V, rng.integers(low, high), dtype=np.int32)

    rng = np.random.default_rng(5)
    examples = [Example(context, [ids(1, 30 - len(context)) for _ in range(4)],
                        int(rng.integers(4)))
                for context in [ids(1, 22) for _ in range(60)]]
    write_examples(HELLASWAG, examples, SMALL.V)
    return examples


def test_prepro_hellaswag(here, vocabulary_here, run_here, monkeypatch):
    with Server({"/x": (200, {}, LINES.encode())}) as server:
        command = hellaswag, "--url", f"{server.url}/x"
        run_here(*command, fails=("/x: SHA-256", "expected 0aa3b88843990f3f", "--input FILE"))
        assert not list((here / "data").iterdir())
        monkeypatch.setattr(hellaswag, "SHA256", hashlib.sha256(LINES.encode()).hexdigest())
        for _ in range(2):
            assert run_here(*command).stdout == f"Saved 2 examples to {HELLASWAG}\n"
        assert len(server.seen) == 2
    first = [65535, 2 * 26, 0, 3, 4, 4, 32, 582, 13, 339, 3, 318, 572, 13, 7, 6622, 257, 6437, 1134,
             338, 23441, 13,
             1, 275, 1, 257]
    second = [65535, 2 * 18, 1, 0, 4, 2, 464, 4252, 2, 16736, 13, 2, 5621, 13, 1, 275, 1, 257]
    header = struct.pack("<256i", 20240522, 1, 2, 2 * 26, *[0] * 252)
    assert (here / HELLASWAG).read_bytes() == header + struct.pack(f"<{26 + 18}H", *first, *second)


@pytest.mark.parametrize("line, word",
                         (("not JSON", "JSONDecodeError"), ('{"ctx": "a"}', "endings"),
    ('{"ctx": "a", "endings": ["b", "c"], "label": 0}', "2 endings")))
def test_prepro_hellaswag_refuses_other_lines(tmp_path, vocabulary_here, run_here, line, word):
    path = tmp_path / "x.jsonl"
    path.write_text(f"{LINES}{line}\n")
    run_here(hellaswag, "--input", path, "--output", tmp_path / "o",
             fails=(word, "x.jsonl:4", "'ctx'"))
    assert not (tmp_path / "o").exists()
    run_here(hellaswag, "--input", path, "--output", path, fails=["the text itself"])
    assert path.read_text() == f"{LINES}{line}\n"


def test_prepro_mmlu(workplace, vocabulary_here, run_here, results):
    """The test files of the archive, sorted; evaluate.py takes them as it takes HellaSwag's."""
    files = {"data/test/b_test.csv": 'What is "a",,"b, c",d,e,C\n', "data/val/a_val.csv": "x",
             "data/test/a_test.csv":
             '"Two\nlines?",one,two,three,four,B\n'}

    def pack(files):
        with tarfile.open("data.tar", "w") as archive:
            for name, text in files.items():
                Path("member").write_text(text)
                archive.add("member", name)

    pack(files)
    assert (run_here(mmlu, "--input", "data.tar").stdout
            == "Saved 2 examples to data/mmlu_test.bin\n")
    first, second = load_examples("data/mmlu_test.bin", 50257, 64)
    text = open_vocabulary("gpt2").decode
    assert (text(first.context) == "Question: Two\nlines?\n\nAnswer:"
            and (first.label, second.label) == (1, 2))
    assert [text(ids) for ids in second.endings] == [" ", " b, c", " d", " e"]
    run_here(mmlu, "--input", "data.tar", "--vocabulary", "bytes", "--output", "x.bin")
    config = dataclasses.replace(SMALL, maxT=64)
    write_model("gpt2_124M.bin", config, random_params(config))
    found = results("gpt2_124M.bin", "--mmlu", "x.bin", "--hellaswag", "x.bin", *TOKENIZER)
    assert found["mmlu"] == found["hellaswag"] and found["mmlu"]["examples"] == 2
    pack({"data/test/x_test.csv": "a,b\n"})
    run_here(mmlu, "--input", "data.tar", fails=("x_test.csv:1: ['a', 'b'], expected a question",))
    run_here(mmlu, "--input", "gpt2_124M.bin", fails=("not MMLU's data.tar",))


def test_a_file_is_read_whole_or_refused(examples):
    write_examples("large.bin", examples, 70_000)  # whose numbers have 32 bits
    for path in (HELLASWAG, "large.bin"):
        np.testing.assert_equal(load_examples(path, SMALL.V, 64), examples)
    data = Path(HELLASWAG).read_bytes()

    def put(position, value, at=1024):
        struct.pack_into("<H" if at else "<i", changed := bytearray(data), at + 2 * position, value)
        return changed

    faults = [("magic", put(0, 1, 0)), ("version 3", put(2, 3, 0)),
              ("with 0 examples", put(4, 0, 0)),
              ("record 60 of 61", put(4, 61, 0)), ("token id 300, expected 0 to 256", put(6, 300)),
              ("record 59 of 60", data[:-2]), ("after the last record", data + b"\0\0"),
              ("1024-byte header", data[:1000]), ("record 0 of 60", put(1, 9))]
    for what, changed in faults:
        Path("x.bin").write_bytes(changed)
        pytest.raises(UserError, load_examples, "x.bin", SMALL.V, 64).match(f"x.bin: .*{what}")


@pytest.fixture
def hf(examples):
    """transformers' model of gpt2_124M.bin, and of the folder hf: its weights are so large that the
    context counts."""
    transformers = pytest.importorskip("transformers")
    write_model("gpt2_124M.bin", SMALL, random_params(SMALL, spread=0.5))
    export_weights.write_hf_folder("gpt2_124M.bin", "hf")
    return transformers.GPT2LMHeadModel.from_pretrained("hf").eval()


def hf_losses(hf, inputs, targets):
    """Of targets (T,), each predicted from the inputs (T,) up to its position."""
    torch = pytest.importorskip("torch")
    inputs, targets = (torch.as_tensor(np.asarray(ids, np.int64)) for ids in (inputs, targets))
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(hf(inputs[None]).logits[0], targets,
                                                 reduction="none").double().numpy()


@pytest.mark.parametrize("T, stride", ((32, 16), (32, 32), (20, 7)))
def test_transformers_has_the_same_numbers(hf, results, T, stride):
    tokens = np.memmap("data/tiny_shakespeare_val.bin", "<i4", "r+")[:300]
    tokens[::97] = 256  # end of text, which is no text
    write_tokenizer("lengths.bin", [b"x" * (1 + id % 3) for id in range(256)] + [b"<|endoftext|>"],
                    256)
    flags = ("--data", "data/tiny_shakespeare", "--tokens", 300, "--context", T, "--stride", stride,
             "--tokenizer",
             "lengths.bin")
    found = results("gpt2_124M.bin", *flags)
    rows = [hf_losses(hf, tokens[i : i + T], tokens[i + 1 : i + T + 1])
            for i in range(0, 300 - T, T)]
    assert (found["validation_loss"] == pytest.approx(np.mean(rows), abs=1e-3)
            and len(rows) == 299 // T)
    losses = []
    last = 0
    # transformers' "Perplexity of fixed-length models"
    for begin in range(0, 300 - T + stride, stride):
        end = min(begin + T, 300)
        losses += hf_losses(hf, tokens[begin : end - 1],
                            tokens[begin + 1 : end])[last - end :].tolist()
        last = end
    assert (found["perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-3)
            and found["tokens"] == len(losses))
    assert (found["device"], found["context"], found["stride"]) == ("CPU", T, stride)
    if stride < T:  # so all but the first are scored
        text = tokens[1:] != 256
        assert found["bytes"] == (1 + tokens[1:] % 3)[text].sum()
        bits = np.array(losses)[text].sum() / math.log(2)
        assert found["bits_per_byte"] == pytest.approx(bits / found["bytes"], rel=1e-3)
    assert {**results("hf", *flags), "model": "gpt2_124M.bin"} == found


def test_transformers_finds_the_same_endings(hf, examples, results):
    """By the mean loss of an ending's tokens, acc_norm, and by their sum, acc."""
    right = []
    for context, endings, label in examples:
        rows = [np.concatenate((context, ending)) for ending in endings]
        losses = [hf_losses(hf, row[:-1], row[1:])[-len(ending) :]
                  for row, ending in zip(rows, endings)]
        right.append([int(np.argmin([of(loss) for loss in losses]) == label)
                      for of in (np.mean, np.sum)])
    for count in range(5, 61, 5):
        found = results("gpt2_124M.bin", "--hellaswag", HELLASWAG, "--examples", count)["hellaswag"]
        normed, plain = map(sum, zip(*right[:count]))
        assert found == {"acc_norm": normed / count, "acc": plain / count, "correct": normed,
                         "examples": count}
    assert normed != plain


def test_the_table(examples, results, run_here):
    flags = ("gpt2_124M.bin", "--data", "data/tiny_shakespeare_v*.bin", "--hellaswag", HELLASWAG,
             *TOKENIZER)
    table = dict(re.findall(r"^\| (\S.*?) +\| (.*?) +\|$", run_here(evaluate, *flags).stdout,
                            re.MULTILINE))
    found = results(*flags, "--batch_size", 3)
    assert table == {"model": "gpt2_124M.bin", "device": "CPU", "context": "32",
                     "tokens scored": "599",
        "data": "data/tiny_shakespeare_v*.bin",
        "validation loss": f"{found['validation_loss']:.6f}, of windows"
                           f" {found['validation_stride']} tokens apart",
        "perplexity": f"{found['perplexity']:.4f} = exp({np.log(found['perplexity']):.4f}), of"
                      f" windows {found['stride']} tokens apart",
        "bits per byte": f"{found['bits_per_byte']:.4f}, of windows {found['stride']} tokens apart",
        "HellaSwag acc_norm": f"{found['hellaswag']['correct'] / 60:.4f}"
                              f" ({found['hellaswag']['correct']} of 60)",
        "HellaSwag acc": f"{found['hellaswag']['acc']:.4f}"}


def test_random_weights_are_for_sequences_of_the_run(examples, results, run_here):
    run_here(train_gpt2, "-e", "d2", "-t", 16, "-b", 1, "-x", 1, "-l", 0, "-v", 0, "-s", 0, "-o",
             "run16")
    short = read_model("run16/model_00000001.bin", train_gpt2.GPT2)[1]
    long = train_gpt2.random_model("d2", 257, Settings().seed, 1100)[1]
    assert short.wpe.shape == (16, 128) and long.wpe.shape == (1100, 128)
    for name in short.table:
        assert np.array_equal(getattr(short, name), getattr(long, name)[:16] if name == "wpe"
                              else getattr(long, name))
    found = results("run16", "--data", "data/tiny_shakespeare")
    assert (found["context"], found["stride"]) == (16, 8)
    run_here(evaluate, "run16", "--hellaswag", HELLASWAG,
             fails=("sequence of 16", "train one with -t 28"))


def test_several_files_and_their_first_tokens(examples, results):
    """Windows do not go on from one file to the next; --tokens counts over all."""
    tokens = np.fromfile("data/tiny_shakespeare_val.bin", "<i4")
    for i, piece in enumerate((tokens[:100], tokens[100:110], tokens[110:])):
        write_tokens(f"data/part_{i}.bin", [piece], len(piece), "uint16")

    def found(files, *flags):
        return results("gpt2_124M.bin", "--context", 32, "--stride", 8, "--data",
                       f"data/part_{files}.bin", *flags)

    parts = [found(i) for i in range(3)]
    whole = found("*")
    assert whole["tokens"] == sum(part["tokens"] for part in parts) == 597
    mean = sum(part["tokens"] * math.log(part["perplexity"]) for part in parts) / 597
    assert math.log(whole["perplexity"]) == pytest.approx(mean)
    assert (found("*", "--tokens", 105)["tokens"] == 103
            and found(1, "--stride", 99)["stride"] == 32), "the context"


@pytest.mark.parametrize("flags, words", (
    ((), ("--data FILES", "--hellaswag FILE")),
    (("--data", "none"), ("none_val.bin", "no such file")),
    (("--data", "none*.bin"), ("none*.bin", "no file matches")),
    (("--hellaswag", HELLASWAG, "huge.bin"), ["finite"]),
    (("--data", "data/one.bin"), ("one.bin: 1 tokens", "at least 2")),
    (("--data", "x", "--tokens", 1), ["--tokens 1"]),
    (("--data", "x", "--examples", 3), ["--examples 3", "no --hellaswag or --mmlu"]),
    (("--hellaswag", HELLASWAG, "--tokens", 9), ["--tokens 9", "no --data"]),
    (("--data", "data/large.bin"), ("token id 500", "0 to 256")),
    (["nowhere.bin"], ["nowhere.bin: no such file"]),
    (("--hellaswag", "none.bin"), ("none.bin", "python prepro/hellaswag.py")),
    (("--hellaswag", "data/one.bin"), ("one.bin", "file of evaluation examples")),
    (("--hellaswag", HELLASWAG, "--context", 20),
     (HELLASWAG, "sequence of 20", "--context 28 or more")),
    (("--data", "data/tiny_shakespeare", "huge.bin"), ["loss is"])))
def test_evaluate_refuses(examples, run_here, flags, words):
    write_tokens("data/one.bin", [np.array([3])], 1)
    write_tokens("data/large.bin", [np.array([3, 500])], 2)
    write_model("huge.bin", SMALL, random_params(SMALL, spread=1e30))
    model = () if flags and flags[-1] in ("huge.bin", "nowhere.bin") else ("gpt2_124M.bin",)
    run_here(evaluate, *flags, *model, *TOKENIZER, fails=words)


def test_on_a_gpu(examples, fake_gpu, results, run_here):
    """A fake one, whose losses are 0: forward passes alone. What its kernels do not take runs on
    the CPU."""
    write_model("heads.bin", SMALL_HEADS, random_params(SMALL_HEADS))
    found = results("heads.bin", *ALL)
    assert (found["device"] == "a fake GPU" and found["validation_loss"] == 0.0
            and found["perplexity"] == 1.0)
    assert found["hellaswag"]["correct"] == sum(example.label == 0 for example in examples)
    names = {launch.name for launch in fake_gpu.launches}
    assert {"encoder_forward", "attention_forward", "classifier"} <= names
    assert not any("backward" in name or "adamw" in name for name in names)
    assert results("heads.bin", *ALL, "--device", "cpu")["device"] == "CPU"
    done = run_here(evaluate, "gpt2_124M.bin", *ALL, "--json")
    assert (json.loads(done.stdout)["device"] == "CPU"
            and done.stderr.startswith("note: this runs on the CPU: "))
    run_here(evaluate, "gpt2_124M.bin", *ALL, "--device", "gpu", fails=["C=24 with NH=3 heads"])


def test_a_gpu_has_the_cpu_s_numbers(examples, gpu, results):
    write_model("heads.bin", SMALL_HEADS, random_params(SMALL_HEADS))
    cpu, on_gpu = (results("heads.bin", *ALL, "--device", device) for device in ("cpu", "gpu"))
    assert on_gpu["device"] == gpu.name
    assert on_gpu["validation_loss"] == pytest.approx(cpu["validation_loss"], abs=1e-3)
    assert on_gpu["perplexity"] == pytest.approx(cpu["perplexity"], rel=1e-3)
    assert abs(on_gpu["hellaswag"]["correct"] - cpu["hellaswag"]["correct"]) <= 1


def test_a_run_evaluates_at_each_validation(examples, results, run_here):
    """But the first, as llm.c."""
    done = run_here(train_gpt2, *FLAGS, "-l", 0.01, "-o", "run", "--hellaswag", 1)
    found = re.findall(r"val loss .*\nstep ./4 \| HellaSwag (\d+)/60 = (0\.\d{4})$", done.stdout,
                       re.MULTILINE)
    assert len(found) == 2
    assert all(f"{int(correct) / 60:.4f}" == accuracy for correct, accuracy in found)
    events = re.findall(r"s:(\d) eval:(\S+)", Path("run/main.log").read_text())
    assert events == [(str(2 * i), accuracy) for i, (_, accuracy) in enumerate(found, 1)]
    rows = [line.split(",") for line in Path("run/main.csv").read_text().splitlines()]
    assert ([row[-1] for row in rows[1:] if row[-1]]
            == [f"{int(correct) / 60:.6f}" for correct, _ in found])
    assert results("run", "--hellaswag", HELLASWAG)["hellaswag"]["correct"] == int(found[-1][0])
    assert results("run")["data"] == "data/tiny_shakespeare"
    plain = run_here(train_gpt2, *FLAGS, "-l", 0.01).stdout
    assert (re.findall(r"(?:val|train) loss \S+", plain)
            == re.findall(r"(?:val|train) loss \S+", done.stdout))
    assert re.search(r"HellaSwag \d/9 = ", run_here(train_gpt2, *FLAGS, "--hellaswag", 9).stdout)


# llm.c's run_gpt2_124M.sh, pyrun_gpt2_124M.sh, and the README's sweep; other sizes
@pytest.mark.parametrize("line", (
    "-i data/fineweb_train_*.bin -j data/fineweb_val_*.bin -o log -v 250 -s 20000 -g 144 -h 1 -b 2"
    " -t 32 -d 128 -r 0 -z 1 -c 0.1 -l 0.0006 -q 0.0 -u 700 -n 5000 -y 1 -e d2 -x 3",
    "--input_bin data/fineweb_train_*.bin --input_val_bin data/fineweb_val_*.bin --val_loss_every"
    " 250 --sample_every 0 --output_dir log --write_tensors 0 --model d2 --batch_size 2"
    " --sequence_length 32 --total_batch_size 128 --dtype bfloat16 --compile 1 --tensorcores 1"
    " --flash 1 --num_iterations 3 --weight_decay 0.1 --zero_stage 1 --learning_rate 0.0006"
    " --warmup_iters 700 --learning_rate_decay_frac 0.0 --overfit_single_batch 0",
    "-i data/tiny_shakespeare -v 250 -s 250 -g 14 -l 0.0006 -o stories0.log -x 3 -m -1 -d -1 -ge 1"
    " -lg 9 -pn 1 -e gpt2:d2 -a 1 -t 32"))
def test_llm_c_s_own_command_lines(examples, run_here, line):
    for split in ("train", "val"):
        shutil.copy(f"data/tiny_shakespeare_{split}.bin", f"data/fineweb_{split}_000000.bin")
    done = run_here(train_gpt2, *line.split())
    log = Path("stories0.log" if "stories0" in line else "log/main.log").read_text()
    assert log.count("trl:") == 3 and log.count("eval:") == ("-h 1" in line)
    assert "note: " in done.stderr
    assert "lr:0.000001" in log or "stories" in line
    losses = [float(loss) for loss in re.findall(r"trl:(\S+)", log)]
    assert ("-a 1" not in line
            or losses == sorted(losses, reverse=True)), "one batch, again and again"


@pytest.mark.parametrize("flags, words", (((0, "-e", "d60"), ("expected one of d2, d4",)),
    ((-1,), ("--hellaswag -1",)), ((1, "-v", 0), ("--hellaswag 1", "-v STEPS")),
    ((1, "-t", 16), (HELLASWAG, "sequence of 16", "pass -t 28 or more")),
    ((1, "-e", "d2", "--tokenizer", "two.bin", "-i", "two"),
     (HELLASWAG, "token id", "expected 0 to 1"))))
def test_what_a_run_cannot_evaluate(examples, run_here, flags, words):
    write_tokenizer("two.bin", [b"a", b"b"], 1)
    for split in ("train", "val"):
        write_tokens(f"two_{split}.bin", [np.zeros(100, np.int32)], 100)
    run_here(train_gpt2, *FLAGS, "--hellaswag", *flags, fails=words)
