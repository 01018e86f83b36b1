"""export_weights.py: weights to and from Hugging Face, checked by `transformers`; its files, flags and faults."""

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch

import export_weights as e
from conftest import ROOT, SMALL, Server, hub_pages, make_model, random_params
from llmc.checkpoint import padded, read_model, write_model
from llmc.dataloader import write_tokens
from llmc.errors import UserError
from llmc.resume import checkpoint_paths
from llmc.tensors import bf16_bits, bf16_to_float32, flat
from llmc.tokenizer import read_tokenizer, write_tokenizer
from llmc.debugstate import read_debug_state
from train_gpt2 import Config, GPT2
from vocabulary import EOT, load_encoding, save_vocabulary

transformers = pytest.importorskip("transformers")


def relative(got, expected):
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def hf_model(V=50):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=V, n_positions=40, n_embd=48, n_layer=2, n_head=3, bos_token_id=0,
                                     eos_token_id=0)
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory):
    hf_model().save_pretrained(folder := tmp_path_factory.mktemp("hf"))
    return folder


def our_logits(config, params, ids):
    model = make_model(*ids.shape, 0, config, params)
    model.forward(ids, ids)
    return model.acts.logits


def test_import_from_transformers(tmp_path):
    """Into NumPy's model, and into the reference."""
    theirs = hf_model()
    with torch.no_grad():
        for parameter in theirs.parameters():  # biases and layernorms too, which start as 0 and 1
            parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained(tmp_path)
    _, config, params = e.read_hf_folder(tmp_path)
    assert (config.V, config.Vp, config.C, config.NH, config.L, config.maxT) == (50, 128, 48, 3, 2, 40)
    ids = np.random.default_rng(0).integers(0, 50, (2, 40), dtype=np.int32)
    x = torch.from_numpy(ids).long()
    with torch.no_grad():
        expected = theirs(x).logits.numpy()
        assert relative(our_logits(config, params, ids), expected) < 2e-4
        for flash in (False, True):
            ours = e.to_reference(config, params, flash)
            logits, _ = ours(x, x)
            assert relative(logits.numpy(), expected) < 1e-5
            last, none = ours(x)
            assert none is None and torch.allclose(last[:, 0], logits[:, -1], atol=1e-6)


def test_import_of_shards(tmp_path, hf_folder):
    hf_model().save_pretrained(tmp_path, max_shard_size="50KB")
    one, many = (e.read_hf_folder(folder)[1:] for folder in (hf_folder, tmp_path))
    assert many[0] == one[0] and np.array_equal(flat(many[1]), flat(one[1]))
    first, _, *_ = sorted(tmp_path.glob("model-*"))
    first.unlink()
    with pytest.raises(UserError, match=f"{first.name}: no such file"):
        e.read_hf_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UserError, match="index.json: not the index of a model's shards"):
        e.read_hf_folder(tmp_path)


def test_export_to_transformers(tmp_path, run_here):
    params = random_params(SMALL)
    write_model(tmp_path / "model.bin", SMALL, params)
    done = run_here(e, "--to_hf", tmp_path / "model.bin", tmp_path / "hf")
    files = "config.json, model.safetensors, tokenizer.json, tokenizer_config.json"
    assert done.stdout == f"wrote {files} to {tmp_path}/hf\n"
    theirs, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert theirs.config.bos_token_id == theirs.config.eos_token_id == SMALL.V - 1
    ids = np.random.default_rng(0).integers(0, SMALL.V, (2, 32), dtype=np.int32)
    with torch.no_grad():
        expected = theirs.eval()(torch.from_numpy(ids).long()).logits.numpy()
    assert relative(our_logits(SMALL, params, ids), expected) < 2e-4
    _, config, again = e.read_hf_folder(tmp_path / "hf")
    assert config == SMALL and np.array_equal(flat(again), flat(params))


def test_the_newest_model_of_a_run_and_its_end_of_text(tmp_path, run_here):
    """Both ways, and that of its text; end of text need not be the vocabulary's last token."""
    run = tmp_path / "run"
    run.mkdir()
    for step in (3, 20, 30):
        model, _, done = checkpoint_paths(run, step)
        write_model(model, SMALL, random_params(SMALL, step))
        if step < 30:  # which is not complete
            open(done, "wb").close()
    write_tokenizer(run / "tokenizer.bin", [EOT.encode(), *(bytes([i]) for i in range(256))], 0)
    run_here(e, "--to_hf", run, tmp_path / "hf")
    run_here(e, "--model", run, "--output_dir", tmp_path / "out")
    for params in (e.read_hf_folder(tmp_path / "hf")[2],
                   read_model(tmp_path / "out" / "gpt2_model_00000020.bin", GPT2)[1]):
        assert np.array_equal(flat(params), flat(random_params(SMALL, 20)))
    config = transformers.GPT2Config.from_pretrained(tmp_path / "hf")
    assert (config.bos_token_id, config.eos_token_id) == (0, 0)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").encode(f"A{EOT}") == [66, 0]


@pytest.mark.parametrize("vocabulary", ("gpt2", "bytes", "chars"))
def test_export_with_a_tokenizer(tmp_path, run_here, vocabulary_here, vocabulary):
    """transformers makes our ids of a text, and the text of them. Of another vocabulary, our file alone goes along."""
    text = "".join(map(chr, range(1, 400))) + "naïve \t日本 \U0001f600  two  \n\n's\r\n"
    encoding, model = load_encoding(vocabulary, text), tmp_path / "model.bin"
    config = Config(maxT=16, V=encoding.n_vocab, L=1, NH=1, C=8, Vp=padded(encoding.n_vocab))
    write_model(model, config, random_params(config))
    save_vocabulary(tmp_path / "tokenizer.bin", encoding)
    done = run_here(e, "--to_hf", model, tmp_path / "hf")
    files = ("tokenizer.bin, vocab.json, merges.txt, tokenizer_config.json" if vocabulary == "gpt2" else
             "tokenizer.json, tokenizer_config.json, tokenizer.bin")
    assert f"{files} to" in done.stdout
    assert (tmp_path / "hf" / "tokenizer.bin").read_bytes() == (tmp_path / "tokenizer.bin").read_bytes()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = tokenizer.encode(text)
    assert ids == encoding.encode(text) and tokenizer.decode(ids) == text
    assert tokenizer.encode(f"a{EOT}") == [*encoding.encode("a"), encoding.eot_token]
    assert tokenizer.eos_token_id == encoding.eot_token and len(tokenizer) == encoding.n_vocab
    assert tokenizer.model_max_length == 16
    tokens = read_tokenizer(tmp_path / "tokenizer.bin").tokens
    write_tokenizer(tmp_path / "tokenizer.bin", [b"two", *tokens[1:]], encoding.eot_token)
    run_here(e, "--to_hf", model, tmp_path / "hf", fails=(f"{tmp_path}/hf: has another vocabulary's", "tokenizer.bin"))
    if vocabulary != "gpt2":
        run_here(e, "--to_hf", model, tmp_path / "without")
        assert sorted(os.listdir(tmp_path / "without")) == ["config.json", "model.safetensors", "tokenizer.bin"]
    write_tokenizer(tmp_path / "tokenizer.bin", tokens[1:], encoding.eot_token - 1)
    run_here(e, "--to_hf", model, tmp_path / "bad",
             fails=[f"tokenizer.bin: {config.V - 1} tokens, but the model has V={config.V}"])
    assert not (tmp_path / "bad").exists()
    if vocabulary != "chars":  # V says so
        (tmp_path / "tokenizer.bin").unlink()
        run_here(e, "--to_hf", model, tmp_path / "known")
        known = transformers.AutoTokenizer.from_pretrained(tmp_path / "known")
        assert known.encode(f"{text}{EOT}") == [*ids, encoding.eot_token]


def test_pretrained_from_a_hub_then_from_its_cache(tmp_path, run_here, use_hub):
    hf_model(V=257).save_pretrained(tmp_path / "repository")
    command = e, "--output_dir", tmp_path / "out"
    files = {path.name: path.read_bytes() for path in (tmp_path / "repository").iterdir()}
    with Server(hub_pages("openai-community/gpt2", files)) as server:
        use_hub(server.url, tmp_path / "home")
        run_here(*command)
    model = tmp_path / "out" / "gpt2_124M.bin"
    first = model.read_bytes()
    model.unlink()
    use_hub(None, tmp_path / "home")
    run_here(*command)
    assert model.read_bytes() == first
    for name, url in (("gpt2-xl", None), ("gpt2-large", "http://127.0.0.1:9")):
        use_hub(url, tmp_path / "home")
        run_here(*command, "--model", name, fails=(f"openai-community/{name}", "--model d12"))


@pytest.fixture
def export(tmp_path, monkeypatch, run_here):
    """Run export_weights.py, with random tokens for a batch: export(flag, value, ...) writes to tmp_path/out."""
    (tmp_path / "data").mkdir()
    tokens = np.random.default_rng(0).integers(0, 257, 1000)
    write_tokens(tmp_path / "data" / "tiny_shakespeare_val.bin", [tokens], 1000)
    monkeypatch.chdir(tmp_path)
    return functools.partial(run_here, e, "--model", "d2", "--vocabulary", "bytes", "--output_dir", "out")


def test_random_model_files(tmp_path, export):
    output = export().stdout
    files = ["bytes_tokenizer.bin", "gpt2_d2.bin", "gpt2_d2_bf16.bin", "gpt2_d2_debug_state.bin"]
    assert sorted(os.listdir(tmp_path / "out")) == files
    assert output.count("iteration ") == 10 and "generating:\n---\n" in output
    config, params = read_model(tmp_path / "out" / "gpt2_d2.bin", GPT2)
    assert (config.L, config.NH, config.C, config.V, config.Vp, config.maxT) == (2, 2, 128, 257, 384, 1024)
    for tensor, spread in ((params.wte[:257], 0.02), (params.wpe, 0.02), (params.qkvw, 0.02), (params.fcprojw, 0.01),
                           (params.attprojw, 0.01)):
        assert tensor.std() == pytest.approx(spread, rel=0.02)
    assert (params.ln1w == 1).all() and not params.fcb.any() and not params.wte[257:].any()
    bf16_config, bf16 = read_model(tmp_path / "out" / "gpt2_d2_bf16.bin", GPT2)
    assert bf16_config == config and np.array_equal(flat(bf16), bf16_to_float32(bf16_bits(flat(params))))
    for one in (bf16, params):  # one model in two precisions
        state = read_debug_state(tmp_path / "out" / "gpt2_d2_debug_state.bin", config, one)
    assert state.x.shape == (4, 64) and state.optimizer == e.ADAMW
    assert [f"{loss:.6f}" for loss in state.losses] == re.findall(r"^iteration .*, loss: (\S+),", output, re.MULTILINE)
    first = {name: (tmp_path / "out" / name).read_bytes() for name in files}
    export()
    assert first == {name: (tmp_path / "out" / name).read_bytes() for name in files}, "the same command, the same files"

    shutil.rmtree(tmp_path / "data")  # which random weights alone do not need
    shutil.rmtree(tmp_path / "out")
    assert "iteration" not in export("--debug_state", 0, "--num_iterations", 3).stdout
    assert sorted(os.listdir(tmp_path / "out")) == files[:3]
    code = ("import llmc, zlib, train_gpt2; from llmc.tensors import flat;"
            "print(zlib.crc32(flat(train_gpt2.random_model('d2', 257)[1])))")  # of -e d2, on any number of threads
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT,
                          env={**os.environ, "OMP_NUM_THREADS": "3"})
    assert int(done.stdout) == zlib.crc32(flat(params))


def test_files_for_llm_c_of_april_2024(tmp_path, export, vocabulary_here):
    """Its program reads version 1 of all, knows no bfloat16, and stops at another version of a tokenizer."""
    export("--llmc", "april2024", "--vocabulary", "gpt2", "--num_iterations", 2)
    names = ["gpt2_d2.bin", "gpt2_d2_debug_state.bin", "gpt2_tokenizer.bin"]
    assert sorted(os.listdir(tmp_path / "out")) == names
    assert [int(np.fromfile(tmp_path / "out" / name, "<i4", 2)[1]) for name in names] == [1, 1, 1]
    found = hashlib.sha256((tmp_path / "out" / "gpt2_tokenizer.bin").read_bytes()).hexdigest()
    assert found == "72c44782644dccc955e1b775d0d7552a594bbb54bfc6141e31373324d486956d"
    config, params = read_model(tmp_path / "out" / "gpt2_d2.bin", GPT2)
    assert config.V == 50257
    assert len(read_debug_state(tmp_path / "out" / "gpt2_d2_debug_state.bin", config, params).losses) == 2


def test_the_model_that_is_read_is_not_written_over(tmp_path, export, run_here):
    export()
    write_model(tmp_path / "out" / "gpt2_d2.bin", *read_model(tmp_path / "out" / "gpt2_d2.bin", GPT2), 1)
    for name, found in (("gpt2_d2.bin", 1), ("gpt2_d2_bf16.bin", 5)):
        path = tmp_path / "out" / name
        before = path.read_bytes()
        run_here(e, "--model", path, "--output_dir", tmp_path / "out",
                 fails=(name, f"of version {found}", "would become version 3", "--output_dir"))
        assert path.read_bytes() == before


@pytest.mark.parametrize("flags", (
    ("--dtype", "bfloat16"), ("--flash", 1), ("--inference_only", 1), ("--batch_size", 2, "--sequence_length", 32),
))  # fmt: skip
def test_benchmark_flags(tmp_path, export, flags):
    output = export("--write_tensors", 0, "--num_iterations", 3, *flags).stdout
    losses = [float(loss) for loss in re.findall(r"^iteration .*, loss: (\S+),", output, re.MULTILINE)]
    assert len(losses) == 3 and not (tmp_path / "out").exists()
    assert losses[0] == losses[2] if "--inference_only" in flags else losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize("flags, words", (
    (("--compile", 1), "--compile 1.*--write_tensors 0"), (("--num_iterations", -1), "--num_iterations -1"),
    (("--llmc", "april2024"), "--llmc april2024.*50256.*256 in this vocabulary"),
    (("--sequence_length", 2000), "--sequence_length 2000.*1024"),
    (("--model", "d3"), "--model d3.*d12"), (("--to_hf", "none.bin", "hf"), "--model d2.*--to_hf"),
    (("--device", "cuda:77", "--write_tensors", 0), "--device cuda:77"),
    (("--output_dir", "data/tiny_shakespeare_val.bin/x"), "val.bin/x"),
    (("--input", "none.bin"), "none.bin.*python prepro_text.py"),
))  # fmt: skip
def test_faults(tmp_path, export, flags, words):
    export(*flags, fails=words.split(".*"))
    assert not list(tmp_path.glob("**/gpt2_*"))


def configure(**changes):
    def change(folder):
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**settings, **changes}))
    return change


def reshape(drop="nothing", **add):
    def change(folder):
        state = e.safetensors.torch.load_file(folder / "model.safetensors")
        state = {key: value for key, value in state.items() if not key.endswith(drop)}
        state |= {name.replace("__", "."): value for name, value in add.items()}
        e.safetensors.torch.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return change


@pytest.mark.parametrize("words, damage", (
    ("config.json", lambda folder: (folder / "config.json").unlink()),
    ("model.safetensors", lambda folder: (folder / "model.safetensors").unlink()),
    ("not a safetensors file", lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100)),
    ("configuration of a GPT-2", lambda folder: (folder / "config.json").write_text("[]")),
    ("activation_function is 'relu'", configure(activation_function="relu")),
    ("model_type is 'bert'", configure(model_type="bert")),
    ("layer_norm_epsilon is 1e-06, expected", configure(layer_norm_epsilon=1e-6)),
    ("tie_word_embeddings is False, expected", configure(tie_word_embeddings=False)),
    ("impossible sizes", configure(n_head=7)), ("n_embd is 48.0", configure(n_embd=48.0)),
    ("h.2.ln_1.weight is missing", configure(n_layer=3)),
    ("wpe.weight has shape .* expected .* from config.json", configure(n_positions=41)),
    ("h.1.attn.c_proj.bias is missing", reshape(drop="h.1.attn.c_proj.bias")),
    ("ln_f.bias is of int64", reshape(transformer__ln_f__bias=torch.zeros(48, dtype=torch.int64))),
    ("lm_head.weight differs", reshape(lm_head__weight=torch.zeros(50, 48))),
    ("NaN", reshape(transformer__ln_f__bias=torch.full((48,), torch.nan))),
))  # fmt: skip
def test_hugging_face_folder_faults(tmp_path, hf_folder, words, damage):
    shutil.copytree(hf_folder, tmp_path, dirs_exist_ok=True)
    damage(tmp_path)
    with pytest.raises(UserError, match=words) as error:
        e.read_hf_folder(tmp_path)
    assert "\n" not in str(error.value)
