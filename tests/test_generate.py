"""generate.py: prompts, sampling, the window, JSON, errors; the tokens of the trainer.
llmc.api.load, on both devices: a loss, a text, training steps with the trainer's bits, what is
refused."""

import contextlib
import io
import itertools
import json
import math
import os
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import generate
from conftest import BYTES, ROOT, SMALL, SMALL_HEADS, SMALL_LLAMA, draw_slowly, make_model, random_params, run_program
from llmc import api
from llmc.checkpoint import write_model
from llmc.dataloader import write_tokens
from llmc.errors import UserError
from llmc.sampler import Choice, sample_multinomial
from llmc.tokenizer import write_tokenizer
from llmc.vocabulary import Folder

MODEL = "gpt2_124M.bin"


@pytest.fixture
def text_of(workplace, run_here):
    """text_of(flag, ...): what generate.py prints about the small model."""
    return lambda *flags, **options: run_here(generate, MODEL, *flags, **options).stdout


@pytest.fixture
def samples_of(text_of):
    """The same as JSON, a dict a sample."""
    return lambda *flags: [json.loads(line) for line in text_of(*flags, "--json").splitlines()]


@pytest.mark.parametrize("flags, choice", (((), Choice()), (("--temperature", 0), Choice(0.0)),
    (("--temperature", 0.5, "--top_k", 7, "--top_p", 0.9), Choice(0.5, 7, 0.9))))
@pytest.mark.parametrize("prompt, count",
                         (([], 10), ([5], 10), (list(range(30)), 90), (list(range(100)), 5)))
def test_a_forward_pass_over_all_gives_the_same(samples_of, prompt, count, flags, choice):
    """Also beyond the longest sequence, 32. Without a prompt, a text begins."""
    flags = ("--tokens", count, "--ignore_eot", *flags)
    found = samples_of("--prompt_ids", *prompt, *flags)[0] if prompt else samples_of(*flags)[0]
    assert found["prompt_ids"] == prompt
    assert found["ids"] == draw_slowly(SMALL.maxT, prompt or [256], count, choice)


def test_log_probabilities(samples_of):
    """Of samples that go on from one pass over the prompt."""
    flags = ("--prompt_ids", 7, 8, 9, "--tokens", 12, "--temperature", 2.0, "--ignore_eot",
             "--samples", 3)
    for found in samples_of(*flags):
        model = make_model(1, 14)
        tokens = np.array([[7, 8, 9, *found["ids"]]], np.int32)
        model.forward(tokens[:, :-1], tokens[:, 1:])
        np.testing.assert_allclose(found["logprobs"], -model.acts.losses[0, 2:], rtol=0, atol=1e-5)


def test_samples_do_not_depend_on_how_many_there_are(samples_of):
    def ids(*more):
        return [tuple(sample["ids"])
                for sample in samples_of("--tokens", 40, "--top_k", 50, "--ignore_eot", *more)]

    three = ids("--seed", 5, "--samples", 3)
    assert ids("--seed", 5) == three[:1] and ids("--seed", 5, "--samples", 2) == three[:2]
    assert len({*three, *ids("--seed", 6)}) == 4


def test_choice():
    logits = np.log(np.array([0.1, 0.4, 0.05, 0.25, 0.2], np.float32))
    coins = (np.arange(1000) + 0.5) / 1000
    # last: the last id that is drawn if all four are equally likely
    for arguments, last, shares in (
            ((), 3, [0.1, 0.4, 0.05, 0.25, 0.2]), ((1.0, 99), 3, [0.1, 0.4, 0.05, 0.25, 0.2]),
            ((0.0,), 0, [0, 1, 0, 0, 0]), ((1.0, 1), 0, [0, 1, 0, 0, 0]),
            ((1.0, 0, 0.3), 1, [0, 1, 0, 0, 0]),
            ((1.0, 2), 1, [0, 0.615, 0, 0.385, 0]), ((1.0, 0, 0.6), 2, [0, 0.615, 0, 0.385, 0]),
            ((1.0, 3, 0.7), 2, [0, 0.615, 0, 0.385, 0]),  # top_p of what top_k leaves
            ((0.5,), 3, [0.036, 0.582, 0.009, 0.227, 0.145])):
        ids = [Choice(*arguments).draw(logits, coin) for coin in coins]
        assert ((np.bincount(ids, minlength=5) / 1000).tolist()
                == pytest.approx(shares, abs=0.006)), arguments
        extremes = [Choice(*arguments).draw(np.zeros(4, np.float32), coin)
                    for coin in (0.0, 1 - 2.0**-24)]
        assert extremes == [0, last], arguments
        for coin in (0.0, 0.999):  # where the first id's probability, 0, is on the coin, too
            assert Choice(*arguments).draw(np.array([-np.inf, 0, -np.inf], np.float32), coin) == 1
    assert (sample_multinomial(np.array([0.5, 0.4], np.float32), 0.95)
            == 1), "rounding can leave the sum below the coin"
    assert Choice(1e-46).draw(logits, 0.5) == 1, "a temperature that is 0 in float32"


@pytest.mark.parametrize("text, expected", (
    (None, (0.2, 0, 0.9)), ('{"eos_token_id": 2}', (0.2, 0, 0.9)), ("{", "is not a JSON object"),
    ('{"temperature": 0.6, "top_k": 20, "top_p": null}', (0.6, 20, 1.0)),
    ('{"top_p": 2}', "top_p 2: expected more"),
    ('{"do_sample": false, "temperature": 0.9, "top_p": 0.5}', (0.0, 0, 1.0)),
    ('{"do_sample": true, "top_p": 0.5}', (1.0, 50, 0.5))))
def test_what_a_chat_draws_with(tmp_path, text, expected):
    """generation_config.json says it, as transformers reads it; the command line comes first."""
    if text:
        (tmp_path / "generation_config.json").write_text(text)
    tokenizer = SimpleNamespace(prefix=f"{tmp_path}/")
    with pytest.raises(UserError, match=expected) if isinstance(expected,
                                                                str) else contextlib.nullcontext():
        for given in ({}, {"top_k": 3}):
            generate.complete(args := SimpleNamespace(chat=True, **given), tokenizer)
            assert ((args.temperature, args.top_p) == expected[::2]
                    and args.top_k == given.get("top_k", expected[1]))
    generate.complete(args := SimpleNamespace(chat=False), None)
    assert (args.temperature, args.top_k, args.top_p) == (1.0, 0, 1.0)


def test_what_a_chat_leaves_out(tmp_path, capsys):
    config = {"do_sample": True, "repetition_penalty": 1.3, "min_p": 0.05, "typical_p": 1.0,
              "no_repeat_ngram_size": 3,
              "num_beams": 1, "bad_words_ids": [[5]], "guidance_scale": None,
              "transformers_version": "5"}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    generate.complete(SimpleNamespace(chat=True), SimpleNamespace(prefix=f"{tmp_path}/"))
    assert capsys.readouterr().err == (
        f"note: {tmp_path}/generation_config.json: repetition_penalty 1.3, no_repeat_ngram_size 3,"
        " min_p 0.05, bad_words_ids [[5]]: not used\n")


@pytest.mark.parametrize("template, expected", (
    ("{% for m in messages if tools is none and documents is none %}{{ m.content }}{% endfor %}",
     "Hi"),
    ([{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}], "D"),
    ("{% generation %}{{ {'b': 'é', 'a': 2} | tojson(separators=',:', sort_keys=true) }}{%"
    " endgeneration %}",
     '{"a":2,"b":"é"}'), ("{% foo %}", "line 1: Encountered unknown tag"),
    ("{{ ''.__class__.x }}", "object is unsafe"),
    ("{{ 'x' * 2 ** 60 }}", "MemoryError"), ("{{ 'x' * 2 ** 23 }}", "makes 8388608 characters"),
    ("{{ raise_exception('no') }}", "template says: no"), ("", "no token"),
    (None, "no chat template: train it on chats"), (7, "expected a text")))
def test_chat_templates(tmp_path, template, expected):
    """As transformers renders them; an error is a line. A message without an answer is not kept."""
    pytest.importorskip("jinja2")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    folder = Folder.__new__(Folder)
    folder.prefix = f"{tmp_path}/"
    folder.backend = SimpleNamespace(encode=lambda text, add_special_tokens: SimpleNamespace(
        ids=list(text.encode()), offsets=[]))
    try:
        chat = generate.Chat("model", folder)
        assert chat.ask("Hi") == list(expected.encode()) == chat.ask("Hi")
    except UserError as error:
        assert expected in str(error)


@pytest.fixture
def always(workplace):
    """always(id): the model says this token whatever comes before."""
    def write(id):
        params = random_params(SMALL)
        params.lnfw[:] = 0.0
        params.lnfb[:] = 1e3 * params.wte[id]
        write_model(MODEL, SMALL, params)
    return write


def test_prompts_and_end_of_text(always, text_of, samples_of, monkeypatch):
    """It stops at end of text, unless told not to."""
    def typed(text):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), "utf-8"))

    flags = ("--prompt", "So", "--tokens", 5)
    always(ord("!"))
    assert text_of(*flags) == "So!!!!!\n"
    always(256)
    assert text_of(*flags) == "So\n" and samples_of(*flags)[0]["text"] == ""
    found = samples_of(*flags, "--ignore_eot")[0]
    assert found["ids"] == 5 * [256] and found["text"] == 5 * "<|endoftext|>"
    always(ord("!"))
    assert text_of("--prompt", "größer 🙂", "--tokens", 1) == "größer 🙂!\n"
    typed(b"two\n\xff\n")
    assert text_of("--prompt", "-", "--tokens", 2) == "two\n\ufffd!!\n"
    typed(b"one\n\n\xffa\nb")
    assert text_of("--interactive", "--tokens", 1) == "one!\n\ufffda!\nb!\n"
    typed(b"one\n")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert text_of("--interactive", "--tokens", 1) == "!\n", "a terminal shows what is typed"
    assert text_of("--samples", 2, "--tokens", 2) == "!!\n---\n!!\n"
    always(0xC3)  # half a letter
    assert text_of("--prompt", "a", "--tokens", 1) == "a\ufffd\n"


def test_a_vocabulary_beside_the_model(workplace, always, text_of, run_here, monkeypatch):
    """tokenizer.bin in the model's directory counts; one of the model's name more; --tokenizer
    most."""
    always(33)
    letters = [*map(chr, range(0x3B1, 0x3B1 + 256)), "<|endoftext|>"]
    write_tokenizer("tokenizer.bin", [letter.encode() for letter in letters], 256)
    assert text_of("--prompt", "αβ", "--tokens", 2) == "αβ" + 2 * chr(0x3B1 + 33) + "\n"
    run_here(generate, MODEL, "--prompt", "abc", fails=("--prompt", "'a'"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc\nα\n"))
    done = run_here(generate, MODEL, "--interactive", "--tokens", 1, check=False)
    assert (done.returncode == 1 and done.stdout == "α" + chr(0x3B1 + 33) + "\n"
            and "--prompt: the char" in done.stderr)
    assert text_of("--tokenizer", "gpt2_tokenizer.bin", "--prompt", "a", "--tokens", 1) == "a!\n"
    os.rename("gpt2_tokenizer.bin", "124M_tokenizer.bin")
    assert text_of("--prompt", "a", "--tokens", 1) == "a!\n"


def test_ctrl_c_leaves_the_samples_so_far(workplace, run_here, monkeypatch):
    whole = generate.until_all_stop

    def interrupted(steps, stop):
        yield from itertools.islice(whole(steps, stop), 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "until_all_stop", interrupted)
    done = run_here(generate, MODEL, "--prompt_ids", 65, "--samples", 2, "--ignore_eot", "--json",
                    check=False)
    assert done.returncode == 130
    assert [len(json.loads(line)["ids"]) for line in done.stdout.splitlines()] == [3, 3]
    done = run_here(generate, MODEL, "--prompt_ids", 65, "--tokens", 9, check=False)
    assert done.returncode == 130 and done.stdout.endswith("\n"), "a shell's prompt begins a line"
    assert done.stdout.count("\n") == 1 and done.stderr.endswith("generate.py: interrupted\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
    done = run_here(generate, MODEL, "--interactive", "--samples", 2, "--tokens", 5)
    assert done.stdout.count("---") == 2, "an answer ends, not the program"


@pytest.mark.parametrize("flags, words", (
    (("--prompt", ""), ("--prompt", "empty")),
    (("--prompt_ids", 257), ("--prompt_ids: 257", "0 to 256")),
    (("--prompt_ids", -1), ("--prompt_ids: -1",)), (("--seed", 0), ("--seed 0",)),
    (("--tokenizer", "gpt2_124M.bin"), ("gpt2_124M.bin", "tokenizer"))))
def test_wrong_flags(workplace, run_here, flags, words):
    run_here(generate, MODEL, *flags, fails=words)


@pytest.mark.parametrize("device", ("cpu", pytest.param("gpu", marks=pytest.mark.gpu)))
def test_a_model_that_has_diverged(workplace, run_here, device):
    write_model("huge.bin", SMALL_HEADS, random_params(SMALL_HEADS, spread=1e30))
    run_here(generate, "huge.bin", "--device", device, "--prompt_ids", 65, "--tokens", 9,
             fails=("not finite", "diverged"))


# --------------------------------------------------------------------------------------------------
# llmc.api.load

DEVICES = pytest.mark.parametrize("on_gpu, options", (
    (False, {}), pytest.param(True, {"B": 3, "dtype": "float32"}, marks=pytest.mark.gpu),
    pytest.param(True, {"B": 3, "dtype": "bfloat16"}, marks=pytest.mark.gpu)), ids=str)


@DEVICES
def test_a_text_from_python(heads, on_gpu, options):
    """Longer than the model sees, so that it is read in pieces."""
    model = api.load(MODEL, on_gpu, **options)
    text = "€: a text of more than 65 bytes, a few of them in a second piece"
    ids = model.tokenizer.encode(text)
    assert (model.tokenizer.decode(ids) == text and bytes(ids) == text.encode()
            and len(ids) > model.T + 1)
    check = make_model(1, model.T, config=model.config)
    losses = []
    for begin in range(0, len(ids) - 1, model.T):
        piece = np.array([ids[begin : begin + model.T + 1]])
        losses += check.losses(piece[:, :-1], piece[:, 1:])[0].tolist()
    tolerance = 1e-2 if on_gpu else 1e-6
    assert (abs(model.loss(text) - np.mean(losses)) < tolerance * np.mean(losses)
            and model.loss(ids) == model.loss(text))
    assert (model.generate(text, tokens=9).startswith(text)
            and model.generate(tokens=5) == model.generate(tokens=5))
    likeliest = model.generate([1, 2], tokens=3, temperature=0)
    assert (likeliest[:2] == [1, 2] and len(likeliest) == 5
            and all(isinstance(id, int) for id in likeliest))


@DEVICES
def test_steps_from_python_are_the_trainer_s(heads, on_gpu, options):
    """Loss and model after three updates: the same bits, whatever comes between the steps."""
    T = 32
    flags = ("--dtype", options["dtype"]) if options else ()
    write_tokens("data/tiny_shakespeare_train.bin",
                 [np.random.default_rng(0).integers(0, 257, 9 * T + 1)], 9 * T + 1)
    model = api.load(MODEL, on_gpu, weight_decay=0.1, grad_clip=0.5, **options,
                     **({"T": T} if options else {}))
    done = run_program("train_gpt2_cuda.py" if on_gpu else "train_gpt2.py", "-b", 3, "-t", T, "-x",
                       3, "-l", 1e-3,
                       "-c", 0.1, "--grad_clip", 0.5, "-v", 0, "-s", 0, "-o", "run", *flags)
    ids = np.fromfile("data/tiny_shakespeare_train.bin", "<i4")
    for step in range(3):
        rows = ids[3 * T * step : 3 * T * (step + 1) + 1]
        loss = model.forward(rows[:-1].reshape(3, T), rows[1:].reshape(3, T))
        model.backward()
        assert model.loss("between") > 0 and model.generate(tokens=2)
        model.update(1e-3)
        assert f"{step + 1}/3 | train loss {loss:.4f}" in done.stdout
    model.save("python/model.bin")
    with open("run/model_00000003.bin", "rb") as trained, open("python/model.bin", "rb") as saved:
        assert trained.read() == saved.read()
    assert api.load("python/model.bin", on_gpu, **options).tokenizer.tokens == BYTES


@DEVICES
def test_calls_that_are_refused(heads, on_gpu, options):
    def load(path=MODEL, **more):
        return api.load(path, on_gpu, **options, **more)

    model = load()
    ids = np.zeros((3, 16), int)
    model.forward(*np.zeros((2, 3, model.T), int))
    model.backward()
    for call, words in ((lambda: model.update(-1), "learning_rate -1"),
                        (lambda: model.update(math.nan), "nan"),
        (lambda: model.generate("a", temperature=-1), "temperature .*expected"),
        (lambda: model.generate("a", seed=2**64), "seed .*expected"),
                        (lambda: model.save("data"), "is no file"),
        (lambda: load().backward(), "of forward"), (lambda: load().update(1), "a call of backward"),
        (lambda: (model.forward(ids, ids), model.loss("ab"), model.backward()), "right before"),
        (lambda: model.forward(ids[0], ids[0]), "expected integers"),
                        (lambda: model.forward(ids, ids[1:]), "shape"),
        (lambda: model.forward(ids / 2, ids / 2), "float64"),
                        (lambda: model.forward(ids + 257, ids), "0 to 256"),
        (lambda: model.forward(*np.zeros((2, 1, 65), int)), "at most 64|room for"),
                        (lambda: model.loss("a"), "2"),
        (lambda: load(weight_decay=-1), "weight_decay"),
                        (lambda: load(schedule="cosine"), "expected"),
        (type(model.settings)(decay="none").check, "--decay none: expected one of"),
        (lambda: load("nowhere"), "no such file")):
        pytest.raises(UserError, call).match(words)


@pytest.mark.parametrize("config", (SMALL, SMALL_LLAMA))
def test_batches_may_grow(workplace, config):
    """AdamW's moments stay when a larger batch comes. Of either page, which the file's magic number
    says. Weights that are not finite are not saved."""
    write_model("gpt2_124M.bin", config, random_params(config))
    os.unlink("gpt2_tokenizer.bin")
    models = (api.load(MODEL), api.load(MODEL))
    ids = np.arange(4 * 16).reshape(4, 16)
    assert (models[0].generate([1, 2], 3)[:2] == [1, 2]
            and type(models[0].model).Config is type(config))
    models[1].forward(ids, ids)  # has the room from the start
    for model in models:
        for B in (1, 4, 2):
            model.forward(ids[:B], ids[:B])
            model.backward()
            model.update(1e-3)
    assert np.array_equal(*(model.model.params.buffer for model in models))
    models[0].model.params.lnfw[3] = math.inf
    pytest.raises(UserError, models[0].save,
                  "new/x.bin").match("new/x.bin: tensor lnfw .* it is not saved")
    assert not os.path.exists("new")


def test_the_page_of_the_documentation(workplace, capsys):
    page = (ROOT / "doc" / "python.md").read_text()
    (workplace / "README.md").write_text(page)
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        exec(block.replace('"runs/first"', '"gpt2_124M.bin"'), names)
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split()[1]) for line in lines if re.fullmatch(r"\d+ \d\.\d+", line)]
    assert len(losses) == 20 and losses[-1] < losses[0] and len(lines) > 24
    assert api.load("runs/tuned/model.bin").loss(page) < api.load("gpt2_124M.bin").loss(page)
