"""HellaSwag's file and accuracy, --hellaswag of the trainers, evaluate.py; the numbers of transformers."""

import hashlib
import json
import math
import re
import struct
from pathlib import Path

import numpy as np
import pytest

import evaluate
import export_weights
import prepro_hellaswag
import train_gpt2
from conftest import SMALL, SMALL_HEADS, Server, assert_one_line_error, random_params, write_diverged
from llmc.checkpoint import read_model, write_model
from llmc.dataloader import write_tokens
from llmc.errors import UserError
from llmc.hellaswag import Example, count_correct, read_examples
from prepro_hellaswag import write_examples
from llmc.settings import Settings
from llmc.tensors import flat
from llmc.tokenizer import Tokenizer, write_tokenizer

HELLASWAG = "data/hellaswag_val.bin"


@pytest.fixture
def examples(workplace):
    """60 of random tokens, of any lengths that fit, which data/hellaswag_val.bin has in a workplace."""
    rng = np.random.default_rng(5)

    def ids(low, high):
        return rng.integers(0, SMALL.V, rng.integers(low, high), dtype=np.int32)

    contexts = [ids(1, 22) for _ in range(60)]
    examples = [Example(context, [ids(1, 30 - len(context)) for _ in range(4)], int(rng.integers(4)))
                for context in contexts]
    write_examples(HELLASWAG, examples, SMALL.V)
    return examples


LINES = ('{"ind": 24, "ctx": "A man is sitting on a roof. he", "label": 3, "endings": ["is using wrap to wrap a pair of'
         ' skis.", "is ripping level tiles off.", "is holding a rubik\'s cube.", "starts pulling up roofing on a'
         ' roof."]}\n\n{"ctx": "The sun", "label": "0", "endings": ["rises.", "sets.", "b", "a"]}\n')


def test_prepro_hellaswag_writes_llm_c_s_bytes(tmp_path, vocabulary_here, run_here, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text(LINES)
    assert run_here(prepro_hellaswag, "--input", "x.jsonl").stdout == f"Saved 2 examples to {HELLASWAG}\n"
    first = [65535, 2 * 53, 0, 3, 4, 9, 32, 582, 318, 5586, 319, 257, 9753, 13, 339,
             11, 318, 1262, 14441, 284, 14441, 257, 5166, 286, 1341, 271, 13, 6, 318, 34759, 1241, 19867, 572, 13,
             8, 318, 4769, 257, 6437, 1134, 338, 23441, 13, 9, 4940, 10427, 510, 9753, 278, 319, 257, 9753, 13]
    second = [65535, 2 * 18, 1, 0, 4, 2, 464, 4252, 2, 16736, 13, 2, 5621, 13, 1, 275, 1, 257]
    header = struct.pack("<256i", 20240522, 1, 2, 2 * 53, *[0] * 252)
    assert (tmp_path / HELLASWAG).read_bytes() == header + struct.pack(f"<{53 + 18}H", *first, *second)


def test_prepro_hellaswag_downloads_once_and_checks(tmp_path, vocabulary_here, run_here, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Server({"/x": (200, {}, LINES.encode())}) as server:
        command = prepro_hellaswag, "--url", f"{server.url}/x"
        done = run_here(*command, check=False)
        assert_one_line_error(done, "/x: SHA-256", "expected 0aa3b88843990f3f", "--input FILE", after_bar=True)
        assert not list((tmp_path / "data").iterdir())
        monkeypatch.setattr(prepro_hellaswag, "SHA256", hashlib.sha256(LINES.encode()).hexdigest())
        for _ in range(2):
            run_here(*command)
        assert len(server.seen) == 2


@pytest.mark.parametrize("line, word", (
    ("not JSON", "JSONDecodeError"), ("[]", "TypeError"), ('{"ctx": "a"}', "endings"),
    ('{"ctx": "a", "endings": ["b", "c"], "label": 0}', "2 endings"),
    ('{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 4}', "label 4"),
    ('{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 1.5}', "label 1.5"),
    ('{"ctx": "a", "endings": ["b", "c", "d", 5], "label": 1}', "not text"),
    ('{"ctx": "a", "endings": "abcd", "label": 1}', "not text"),
    ('{"ctx": null, "endings": ["b", "c", "d", "e"], "label": 1}', "not text")))
def test_prepro_hellaswag_refuses_other_lines(tmp_path, vocabulary_here, run_here, line, word):
    """And writes over no text."""
    path = tmp_path / "x.jsonl"
    path.write_text(f"{LINES}{line}\n")
    done = run_here(prepro_hellaswag, "--input", path, "--output", tmp_path / "o", check=False)
    assert_one_line_error(done, word, "x.jsonl:4", "'ctx'")
    assert not (tmp_path / "o").exists()
    assert_one_line_error(run_here(prepro_hellaswag, "--input", path, "--output", path, check=False), "the text itself")
    assert path.read_text() == f"{LINES}{line}\n"


def test_examples_round_trip(examples):
    """Numbers have 16 bits or, of a large vocabulary, 32."""
    write_examples("large.bin", examples, 70_000)
    for path in (HELLASWAG, "large.bin"):
        assert [(a.label, a.context.tolist(), *map(list, a.endings)) for a in read_examples(path, SMALL.V)] == [
            (b.label, list(b.context), *map(list, b.endings)) for b in examples]


def test_a_damaged_file_is_refused(examples):
    data = Path(HELLASWAG).read_bytes()

    def put(position, value, at=1024):
        changed = bytearray(data)
        struct.pack_into("<H" if at else "<i", changed, at + 2 * position, value)
        return bytes(changed)

    faults = [("magic", put(0, 1, 0)), ("version 3", put(2, 3, 0)), ("with 0 examples", put(4, 0, 0)),
              ("record 60 of 61", put(4, 61, 0)), ("token id 300, expected 0 to 256", put(6, 300)),
              ("record 59 of 60", data[:-2]), ("2 or 4 bytes a number", data[:-1]),
              ("after the last record", data + b"\0\0"), ("1024-byte header", data[:1000])]
    for position, value in ((0, 1), (1, 9), (1, 0), (1, 60000), (2, 5), (3, 4), (4, 3), (5, 0), (5, 60000)):
        faults.append(("record 0 of 60", put(position, value)))
    for what, changed in faults:
        Path("x.bin").write_bytes(changed)
        with pytest.raises(UserError, match=f"x.bin: .*{what}"):
            read_examples("x.bin", SMALL.V)


def test_the_first_of_equals_wins_and_only_the_ending_counts():
    """Of a model whose loss is the target itself, and NaN wherever nothing should be read."""
    def losses_of(inputs, targets):
        assert inputs.shape == targets.shape == (len(inputs), 7) and inputs.dtype == np.int32
        return np.where(targets < 50, targets, np.nan)  # the context is made of larger ids

    def correct(*endings, label):
        example = Example(np.array([90, 91, 92]), [np.array(ending) for ending in endings], label)
        return count_correct(losses_of, [example], 4, 7)

    assert correct([3, 5], [4], [9, 9], [8], label=0) == 1
    assert correct([3, 5], [4], [9, 9], [8], label=1) == 0
    assert correct([9], [1, 1, 1, 8], [4], [5], label=1) == 1, "the mean, not the sum"
    with pytest.raises(UserError, match="not finite"):
        correct([99], [1], [2], [3], label=0)


@pytest.fixture
def hf(examples):
    """transformers' model of gpt2_124M.bin, and of the folder hf: its weights are so large that the context counts."""
    transformers = pytest.importorskip("transformers")
    params = random_params(SMALL)
    flat(params)[:] *= 5
    write_model("gpt2_124M.bin", SMALL, params)
    export_weights.write_hf_folder("gpt2_124M.bin", "hf")
    hf = transformers.GPT2LMHeadModel.from_pretrained("hf").eval()
    hf.loss_type = "ForCausalLM"  # which is what it warns that it takes
    return hf


def hf_losses(hf, inputs, targets):
    """The losses of targets (T,), each predicted from the inputs (T,) up to its position."""
    torch = pytest.importorskip("torch")
    inputs, targets = (torch.as_tensor(np.asarray(ids, np.int64)) for ids in (inputs, targets))
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(hf(inputs[None]).logits[0], targets, reduction="none").double().numpy()


def hf_perplexity(hf, tokens, T, stride):
    """transformers' "Perplexity of fixed-length models": a window scores what none before it has."""
    losses, last = [], 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + T, len(tokens))
        losses.append(hf_losses(hf, tokens[begin : end - 1], tokens[begin + 1 : end])[last - end :])
        last = end
        if end == len(tokens):
            break
    losses = np.concatenate(losses)
    return math.exp(losses.mean()), len(losses)


@pytest.mark.parametrize("T, stride", ((32, 16), (32, 32), (20, 7)))
def test_transformers_has_the_same_numbers(hf, run_here, T, stride):
    tokens = np.memmap("data/tiny_shakespeare_val.bin", "<i4", "r+")[:300]
    tokens[::97] = 256  # end of text
    flags = ("--data", "data/tiny_shakespeare", "--tokens", 300, "--context", T, "--stride", stride, "--json",
             "--tokenizer", "gpt2_tokenizer.bin")
    found = json.loads(run_here(evaluate, "gpt2_124M.bin", *flags).stdout)
    rows = [hf_losses(hf, tokens[i : i + T], tokens[i + 1 : i + T + 1]) for i in range(0, 300 - T, T)]
    assert found["validation_loss"] == pytest.approx(np.mean(rows), abs=1e-3) and len(rows) == 299 // T
    perplexity, count = hf_perplexity(hf, tokens, T, stride)
    assert found["perplexity"] == pytest.approx(perplexity, rel=1e-3) and found["tokens"] == count
    assert (found["device"], found["context"], found["stride"]) == ("CPU", T, stride)
    if stride == T // 2:  # in this vocabulary a token is a byte, but for end of text
        assert found["bytes"] == (tokens[1:] != 256).sum() < found["tokens"]
    folder = json.loads(run_here(evaluate, "hf", *flags).stdout)
    assert {**folder, "model": "gpt2_124M.bin"} == found


def test_transformers_finds_the_same_endings(hf, examples, run_here):
    correct = 0
    for context, endings, label in examples:
        means = [hf_losses(hf, (row := np.concatenate((context, ending)))[:-1], row[1:])[-len(ending) :].mean()
                 for ending in endings]
        correct += int(np.argmin(means) == label)
    found = json.loads(run_here(evaluate, "gpt2_124M.bin", "--hellaswag", HELLASWAG, "--json").stdout)
    assert found["hellaswag"] == {"acc_norm": correct / 60, "correct": correct, "examples": 60}


def test_the_table(examples, run_here):
    flags = ("gpt2_124M.bin", "--data", "data/tiny_shakespeare_v*.bin", "--hellaswag", HELLASWAG, "--tokenizer",
             "gpt2_tokenizer.bin")
    table = dict(re.findall(r"^\| (\S.*?) +\| (.*?) +\|$", run_here(evaluate, *flags).stdout, re.MULTILINE))
    found = json.loads(run_here(evaluate, *flags, "--json", "--batch_size", 3).stdout)
    assert table == {
        "model": "gpt2_124M.bin", "device": "CPU", "context": "32", "tokens scored": "599",
        "data": "data/tiny_shakespeare_v*.bin",
        "validation loss": f"{found['validation_loss']:.6f}, of windows {found['validation_stride']} tokens apart",
        "perplexity": f"{found['perplexity']:.4f}, of windows {found['stride']} tokens apart",
        "bits per byte": f"{found['bits_per_byte']:.4f}, of windows {found['stride']} tokens apart",
        "HellaSwag acc_norm": f"{found['hellaswag']['acc_norm']:.4f} ({found['hellaswag']['correct']} of 60)"}
    first = json.loads(run_here(evaluate, *flags, "--json", "--examples", 7).stdout)["hellaswag"]
    assert first["examples"] == 7 and first["correct"] <= found["hellaswag"]["correct"]


def test_random_weights_are_for_sequences_of_the_run(examples, run_here):
    """evaluate.py shows the model no position that was not trained; others begin as they always do."""
    run_here(train_gpt2, "-e", "d2", "-t", 16, "-b", 1, "-x", 1, "-l", 0, "-v", 0, "-s", 0, "-o", "run16")
    short = read_model("run16/model_00000001.bin", train_gpt2.GPT2)[1]
    long = train_gpt2.random_model("d2", 257, Settings().seed, 1100)[1]
    assert short.wpe.shape == (16, 128) and long.wpe.shape == (1100, 128)
    for name in short.table:
        assert np.array_equal(getattr(short, name), getattr(long, name)[:16] if name == "wpe" else getattr(long, name))
    found = json.loads(run_here(evaluate, "run16", "--data", "data/tiny_shakespeare", "--json").stdout)
    assert (found["context"], found["stride"]) == (16, 8)
    done = run_here(evaluate, "run16", "--hellaswag", HELLASWAG, check=False)
    assert_one_line_error(done, "sequence of 16", "train one with -t 28")


def test_bits_per_byte_do_not_depend_on_the_vocabulary(examples, run_here):
    """Of tokens of 3 bytes each, they are a third."""
    flags = ("gpt2_124M.bin", "--data", "data/tiny_shakespeare", "--json", "--stride", 100, "--tokenizer")
    write_tokenizer("three.bin", [b"abc"] * 256 + [b"<|endoftext|>"], 256)
    one, three = (json.loads(run_here(evaluate, *flags, f"{name}.bin").stdout) for name in ("gpt2_tokenizer", "three"))
    assert three["bytes"] == 3 * one["bytes"] and 3 * three["bits_per_byte"] == pytest.approx(one["bits_per_byte"])
    assert three["perplexity"] == one["perplexity"] and one["stride"] == 32, "the context"
    found = evaluate.Sum(Tokenizer([b"ab", b"c", b"<|endoftext|>"], 2))
    found.add(np.array([0, 1, 2]), np.array([1.0, 2.0, 4.0]) * math.log(2))
    assert found.bits_per_byte == pytest.approx((1 + 2) / 3) and found.mean == pytest.approx(7 * math.log(2) / 3)


def test_several_files_and_their_first_tokens(examples, run_here):
    """Windows do not go on from one file to the next; --tokens counts over all."""
    tokens = np.fromfile("data/tiny_shakespeare_val.bin", "<i4")
    for i, piece in enumerate((tokens[:100], tokens[100:110], tokens[110:])):
        write_tokens(f"data/part_{i}.bin", [piece], len(piece), "uint16")

    def found(files, *flags):
        flags = ("gpt2_124M.bin", "--context", 32, "--stride", 8, "--json", "--data", f"data/part_{files}.bin", *flags)
        return json.loads(run_here(evaluate, *flags).stdout)

    parts, whole = [found(i) for i in range(3)], found("*")
    assert whole["tokens"] == sum(part["tokens"] for part in parts) == 597
    mean = sum(part["tokens"] * math.log(part["perplexity"]) for part in parts) / 597
    assert math.log(whole["perplexity"]) == pytest.approx(mean)
    assert found("*", "--tokens", 105)["tokens"] == 103


@pytest.mark.parametrize("flags, words", (
    ((), ("--data FILES", "--hellaswag FILE")), (("--data", "none"), ("none_val.bin", "no such file")),
    (("--data", "none*.bin"), ("none*.bin", "no file matches")),
    (("--data", "data/one.bin"), ("one.bin: 1 tokens", "at least 2")),
    (("--data", "data/large.bin"), ("token id 500", "expected 0 to 256")),
    (("nowhere.bin",), ("nowhere.bin: no such file",)),
    (("--hellaswag", "none.bin"), ("none.bin", "python prepro_hellaswag.py")),
    (("--hellaswag", "data/one.bin"), ("one.bin", "file of evaluation examples")),
    (("--hellaswag", HELLASWAG, "--context", 20), (HELLASWAG, "sequence of 20", "--context 28 or more")),
    (("--data", "x", "--stride", -1), ("--stride -1",)), (("--data", "x", "--context", 1), ("--context 1",)),
    (("--data", "x", "--tokens", 1), ("--tokens 1",)),
    (("--data", "x", "--batch_size", 10**15), ("--batch_size 1000000000000000", "65535")),
    (("--data", "data/tiny_shakespeare", "huge.bin"), ("loss is",)),
    (("--hellaswag", HELLASWAG, "huge.bin"), ("not finite",))))
def test_evaluate_refuses(examples, run_here, flags, words):
    write_tokens("data/one.bin", [np.array([3])], 1)
    write_tokens("data/large.bin", [np.array([3, 500])], 2)
    write_diverged("huge.bin")
    model = () if flags and flags[-1] in ("huge.bin", "nowhere.bin") else ("gpt2_124M.bin",)
    done = run_here(evaluate, *flags, *model, "--tokenizer", "gpt2_tokenizer.bin", check=False)
    assert_one_line_error(done, *words, after_bar=True)


ALL = ("--data", "data/tiny_shakespeare", "--hellaswag", HELLASWAG, "--json", "--tokenizer", "gpt2_tokenizer.bin")


def test_on_a_gpu(examples, fake_gpu, run_here):
    """A fake one, whose losses are 0: forward passes alone. What its kernels do not take runs on the CPU."""
    write_model("heads.bin", SMALL_HEADS, random_params(SMALL_HEADS))
    found = json.loads(run_here(evaluate, "heads.bin", *ALL).stdout)
    assert found["device"] == "a fake GPU" and found["validation_loss"] == 0.0 and found["perplexity"] == 1.0
    assert found["hellaswag"]["correct"] == sum(example.label == 0 for example in examples)
    names = {launch.name for launch in fake_gpu.launches}
    assert {"encoder_forward", "attention_forward", "classifier"} <= names
    assert not any("backward" in name or "adamw" in name for name in names)
    assert json.loads(run_here(evaluate, "heads.bin", *ALL, "--device", "cpu").stdout)["device"] == "CPU"
    done = run_here(evaluate, "gpt2_124M.bin", *ALL)
    assert json.loads(done.stdout)["device"] == "CPU" and done.stderr.startswith("note: this runs on the CPU: ")
    done = run_here(evaluate, "gpt2_124M.bin", *ALL, "--device", "gpu", check=False)
    assert_one_line_error(done, "C=24 with NH=3 heads")


def test_a_gpu_has_the_cpu_s_numbers(examples, gpu, run_here):
    write_model("heads.bin", SMALL_HEADS, random_params(SMALL_HEADS))
    cpu, on_gpu = (json.loads(run_here(evaluate, "heads.bin", *ALL, "--device", device).stdout)
                   for device in ("cpu", "gpu"))
    assert on_gpu["device"] == gpu.name
    assert on_gpu["validation_loss"] == pytest.approx(cpu["validation_loss"], abs=1e-3)
    assert on_gpu["perplexity"] == pytest.approx(cpu["perplexity"], rel=1e-3)
    assert abs(on_gpu["hellaswag"]["correct"] - cpu["hellaswag"]["correct"]) <= 1


FLAGS = ("-x", 4, "-b", 2, "-t", 32, "-v", 2, "-s", 0)


def test_a_run_evaluates_at_each_validation(examples, run_here):
    done = run_here(train_gpt2, *FLAGS, "-l", 0.01, "-o", "run", "--hellaswag", 1)
    found = re.findall(r"val loss .*\nstep ./4 \| HellaSwag (\d+)/60 = (0\.\d{4})$", done.stdout, re.MULTILINE)
    assert len(found) == 3 and all(f"{int(correct) / 60:.4f}" == accuracy for correct, accuracy in found)
    events = re.findall(r"s:(\d) eval:(\S+)", Path("run/main.log").read_text())
    assert events == [(str(2 * i), f"{int(correct) / 60:.4f}") for i, (correct, _) in enumerate(found)]
    rows = [line.split(",") for line in Path("run/main.csv").read_text().splitlines()]
    assert [row[-1] for row in rows[1:] if row[-1]] == [f"{int(correct) / 60:.6f}" for correct, _ in found]
    last = json.loads(run_here(evaluate, "run", "--hellaswag", HELLASWAG, "--json").stdout)["hellaswag"]
    assert last["correct"] == int(found[-1][0])
    assert json.loads(run_here(evaluate, "run", "--json").stdout)["data"] == "data/tiny_shakespeare"
    plain = run_here(train_gpt2, *FLAGS, "-l", 0.01).stdout
    assert re.findall(r"(?:val|train) loss \S+", plain) == re.findall(r"(?:val|train) loss \S+", done.stdout)
    assert re.search(r"HellaSwag \d/9 = ", run_here(train_gpt2, *FLAGS, "--hellaswag", 9).stdout)


@pytest.mark.parametrize("flags, words", (
    ((-1,), ("--hellaswag -1",)), ((1, "-v", 0), ("--hellaswag 1", "-v STEPS")),
    ((1, "-t", 16), (HELLASWAG, "sequence of 16", "pass -t 28 or more")),
    ((1, "-e", "d2", "--tokenizer", "two.bin", "-i", "two"), (HELLASWAG, "token id", "expected 0 to 1"))))
def test_what_a_run_cannot_evaluate(examples, run_here, flags, words):
    write_tokenizer("two.bin", [b"a", b"b"], 1)
    for split in ("train", "val"):
        write_tokens(f"two_{split}.bin", [np.zeros(100, np.int32)], 100)
    assert_one_line_error(run_here(train_gpt2, *FLAGS, "--hellaswag", *flags, check=False), *words)
