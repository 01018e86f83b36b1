"""export_weights.py: weights to and from Hugging Face, checked by `transformers`; its files, flags
and faults."""

import functools
import hashlib
import json
import os
import re
import shutil

import numpy as np
import pytest
import safetensors.torch
import torch

import export_weights as e
from conftest import SMALL, Server, hub_pages, random_params
from llmc.checkpoint import padded, read_model, write_model
from llmc.errors import UserError
from llmc.resume import checkpoint_paths
from llmc.tensors import bf16_bits, bf16_to_float32, flat
from llmc.tokenizer import read_tokenizer, write_tokenizer
from llmc.debugstate import read_debug_state
from reference import ADAMW
from train_gpt2 import Config, GPT2, random_model
from llmc.vocabulary import EOT, open_vocabulary, save_vocabulary

transformers = pytest.importorskip("transformers")


def hf_model(V=50):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=V, n_positions=40, n_embd=48, n_layer=2, n_head=3)
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory):
    hf_model().save_pretrained(folder := tmp_path_factory.mktemp("hf"))
    return folder


@pytest.fixture(scope="module")
def hf_llama(tmp_path_factory):
    """With a head of its own."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=50, max_position_embeddings=40, hidden_size=48, intermediate_size=40,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2))
    model.save_pretrained(folder := tmp_path_factory.mktemp("llama"))
    return folder


def test_import_of_shards(tmp_path, hf_folder):
    hf_model().save_pretrained(tmp_path, max_shard_size="50KB")
    one, many = (e.read_hf_folder(folder)[1:] for folder in (hf_folder, tmp_path))
    assert many[0] == one[0] and np.array_equal(flat(many[1]), flat(one[1]))
    first, _, *_ = sorted(tmp_path.glob("model-*"))
    first.unlink()
    pytest.raises(UserError, e.read_hf_folder, tmp_path).match(f"{first.name}: no such file")


@pytest.mark.parametrize("prefix", ("", "module.", "_orig_mod.", "language_model."))
@pytest.mark.parametrize("base", (True, False))
@pytest.mark.parametrize("kind", ("gpt2", "llama"))
def test_tensors_with_another_prefix(tmp_path, hf_folder, hf_llama, kind, base, prefix):
    """base: whether the model keeps the name that it has within the one with a head."""
    folder, inner = {"gpt2": (hf_folder, "transformer."), "llama": (hf_llama, "model.")}[kind]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(weights)
    safetensors.torch.save_file({prefix + (name if base else name.removeprefix(inner)): tensor
                                 for name, tensor in tensors.items()}, weights)
    want, found = (e.read_hf_folder(path)[1:] for path in (folder, tmp_path))
    assert found[0] == want[0] and np.array_equal(flat(found[1]), flat(want[1]))


@pytest.mark.parametrize("name", ("/dev/zero", "../model.safetensors", "a/../../b", "zero"))
def test_an_index_that_leads_elsewhere(tmp_path, hf_folder, name):
    """A link to a device, too."""
    shutil.copy(hf_folder / "config.json", tmp_path)
    (tmp_path / "zero").symlink_to("/dev/zero")
    index = json.dumps({"weight_map": {"wte.weight": name}})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    pytest.raises(UserError, e.read_hf_folder, tmp_path).match(f"names '{name}'|zero: is no file")


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
    (run / "chat_template.jinja").write_text("{{ messages[0].content }}")
    run_here(e, "--to_hf", run, tmp_path / "hf")
    assert (tmp_path / "hf/chat_template.jinja").read_text() == "{{ messages[0].content }}"
    run_here(e, "--model", run, "--output_dir", tmp_path / "out")
    for config, params in (e.read_hf_folder(tmp_path / "hf")[1:],
                           read_model(tmp_path / "out" / f"gpt2_{run.name}.bin", GPT2)):
        assert config == SMALL and np.array_equal(flat(params), flat(random_params(SMALL, 20)))
    config = transformers.GPT2Config.from_pretrained(tmp_path / "hf")
    assert (config.bos_token_id, config.eos_token_id) == (0, 0)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").encode(f"A{EOT}") == [66, 0]


@pytest.mark.parametrize("vocabulary", ("gpt2", "bytes", "chars"))
def test_export_with_a_tokenizer(tmp_path, run_here, vocabulary_here, vocabulary):
    """transformers makes our ids of a text, and the text of them. Of another vocabulary, our file
    alone goes along."""
    text = "".join(map(chr, range(1, 400))) + "naïve \t日本 \U0001f600  two  \n\n's\r\n"
    encoding = open_vocabulary(vocabulary, text)
    model = tmp_path / "model.bin"
    config = Config(maxT=16, V=len(encoding.tokens), L=1, NH=1, C=8,
                    Vp=padded(len(encoding.tokens)))
    write_model(model, config, random_params(config))
    save_vocabulary(tmp_path / "tokenizer.bin", encoding)
    done = run_here(e, "--to_hf", model, tmp_path / "hf")
    files = ("tokenizer.bin, vocab.json, merges.txt, tokenizer_config.json" if vocabulary == "gpt2"
             else
             "tokenizer.json, tokenizer_config.json, tokenizer.bin")
    assert done.stdout == f"wrote model.safetensors, {files}, config.json to {tmp_path}/hf\n"
    assert ((tmp_path / "hf" / "tokenizer.bin").read_bytes()
            == (tmp_path / "tokenizer.bin").read_bytes())
    again = run_here(e, "--to_hf", model, tmp_path / "hf").stdout
    assert again == f"{done.stdout.strip()}; replaced model.safetensors, {files}, config.json\n"
    shutil.copytree(tmp_path / "hf", tmp_path / "other")
    (tmp_path / "other" / "pytorch_model.bin").touch()
    run_here(e, "--to_hf", model, tmp_path / "other",
             fails=("other: has another model's pytorch_model.bin",))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = tokenizer.encode(text)
    assert ids == encoding.encode(text) and tokenizer.decode(ids) == text
    assert tokenizer.encode(f"a{EOT}") == [*encoding.encode("a"), encoding.eot]
    assert tokenizer.eos_token_id == encoding.eot and len(tokenizer) == len(encoding.tokens)
    assert tokenizer.model_max_length == 16
    tokens = read_tokenizer(tmp_path / "tokenizer.bin").tokens
    write_tokenizer(tmp_path / "tokenizer.bin", [b"two", *tokens[1:]], encoding.eot)
    run_here(e, "--to_hf", model, tmp_path / "hf",
             fails=(f"{tmp_path}/hf: has another vocabulary's", "tokenizer.bin"))
    if vocabulary != "gpt2":
        run_here(e, "--to_hf", model, tmp_path / "without")
        assert (sorted(os.listdir(tmp_path / "without"))
                == ["config.json", "model.safetensors", "tokenizer.bin"])
    (tmp_path / "tokenizer.bin").unlink()  # V does not say which it is
    assert "tokenizer.bin: no such file" in run_here(e, "--to_hf", model, tmp_path / "none").stderr
    assert sorted(os.listdir(tmp_path / "none")) == ["config.json", "model.safetensors"]


def test_pretrained_from_a_hub_then_from_its_cache(tmp_path, run_here, use_hub):
    hf_model(V=257).save_pretrained(tmp_path / "repository")
    command = (e, "--output_dir", tmp_path / "out")
    model = tmp_path / "out" / "gpt2_124M.bin"
    files = {path.name: path.read_bytes() for path in (tmp_path / "repository").iterdir()}
    with Server(hub_pages("openai-community/gpt2", files)) as server:
        use_hub(server.url, tmp_path / "home")
        run_here(*command)
    first = model.read_bytes()
    model.unlink()
    use_hub(None, tmp_path / "home")
    run_here(*command)
    assert model.read_bytes() == first
    for name, url in (("gpt2-xl", None), ("gpt2-large", "http://127.0.0.1:9")):
        use_hub(url, tmp_path / "home")
        run_here(*command, "--model", name, fails=(f"openai-community/{name}", "--model d12"))


@pytest.fixture
def export(workplace, run_here):
    """Run export_weights.py, with random tokens for a batch: export(flag, value, ...) writes to
    tmp_path/out."""
    return functools.partial(run_here, e, "--model", "d2", "--vocabulary", "bytes", "--output_dir",
                             "out")


def test_random_model_files(tmp_path, export, run_here):
    """The model that is read is not written over."""
    output = export().stdout
    names = ["bytes_tokenizer.bin", "gpt2_d2.bin", "gpt2_d2_bf16.bin", "gpt2_d2_debug_state.bin"]
    first = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert (sorted(first) == names and output.count("iteration ") == 10
            and "generating:\n---\n" in output)
    config, params = read_model(tmp_path / "out" / "gpt2_d2.bin", GPT2)
    assert config == Config(L=2, NH=2, C=128, V=257, Vp=384, maxT=1024)
    assert np.array_equal(flat(params), flat(random_model("d2", 257)[1])), "the weights of -e d2"
    for tensor, spread in ((params.wte[:257], 0.02), (params.fcprojw, 0.01),
                           (params.attprojw, 0.01)):
        assert tensor.std() == pytest.approx(spread, rel=0.02)
    assert (params.ln1w == 1).all() and not params.fcb.any() and not params.wte[257:].any()
    bf16_config, bf16 = read_model(tmp_path / "out" / "gpt2_d2_bf16.bin", GPT2)
    assert (bf16_config == config
            and np.array_equal(flat(bf16), bf16_to_float32(bf16_bits(flat(params)))))
    for one in (bf16, params):  # one model in two precisions
        state = read_debug_state(tmp_path / "out" / "gpt2_d2_debug_state.bin", config, one)
    assert state.x.shape == (4, 64) and state.optimizer == ADAMW
    assert ([f"{loss:.6f}" for loss in state.losses]
            == re.findall(r"^iteration .*, loss: (\S+),", output, re.MULTILINE))
    export()
    assert first == {name: (tmp_path / "out" / name).read_bytes()
                     for name in names}, "the same command, the same files"
    path = tmp_path / "out" / "gpt2_d2_bf16.bin"
    run_here(e, "--model", path, "--output_dir", "out",
             fails=("of version 5", "would become version 3"))
    assert path.read_bytes() == first[path.name]


def test_files_for_llm_c_of_april_2024(tmp_path, export, vocabulary_here):
    """Its program reads version 1 of all, knows no bfloat16, and stops at another version of a
    tokenizer."""
    # the last: harmless
    export("--llmc", "april2024", "--vocabulary", "gpt2", "--num_iterations", 1, "--compile", 1)
    names = ["gpt2_d2.bin", "gpt2_d2_debug_state.bin", "gpt2_tokenizer.bin"]
    assert sorted(os.listdir(tmp_path / "out")) == names
    assert [int(np.fromfile(tmp_path / "out" / name, "<i4", 2)[1]) for name in names] == [1, 1, 1]
    found = hashlib.sha256((tmp_path / "out" / "gpt2_tokenizer.bin").read_bytes()).hexdigest()
    assert found == "72c44782644dccc955e1b775d0d7552a594bbb54bfc6141e31373324d486956d"
    assert (read_tokenizer(tmp_path / "out" / "gpt2_tokenizer.bin").tokens
            == open_vocabulary("gpt2").tokens)


@pytest.mark.parametrize("flags", (
    ("--dtype", "bfloat16"), ("--flash", 1), ("--inference_only", 1),
    ("--batch_size", 2, "--sequence_length", 32)))
def test_benchmark_flags(tmp_path, export, flags):
    def losses_of(*flags):
        output = export("--write_tensors", 0, "--num_iterations", 3, *flags).stdout
        return [float(loss)
                for loss in re.findall(r"^iteration .*, loss: (\S+),", output, re.MULTILINE)]

    losses = losses_of(*flags)
    assert "--flash" not in flags or np.allclose(losses, losses_of(), rtol=0, atol=1e-5)
    assert len(losses) == 3 and not (tmp_path / "out").exists()
    assert (losses[0] == losses[2] if "--inference_only" in flags
            else losses[0] > losses[1] > losses[2])


@pytest.mark.parametrize("flags, words", (
    (("--dtype", "bfloat16"), "--dtype bfloat16.*--write_tensors 0"),
    (("--num_iterations", -1), "--num_iterations -1"),
    (("--llmc", "april2024"), "--llmc april2024.*50256.*256 in this vocabulary"),
    (("--sequence_length", 2000), "2000.*1024"),
    (("--to_hf", "none.bin", "hf"), "--model d2.*--to_hf"),
    (("--model", "d3"), "--model d3.*d12"),
    (("--output_dir", "data/tiny_shakespeare_val.bin/x"), "val.bin/x"),
    (("--device", "cuda:77", "--write_tensors", 0), "--device cuda:77"),
    (("--input", "none.bin"), "none.bin.*python prepro_text.py")))
def test_faults(tmp_path, export, flags, words):
    export(*flags, fails=words.split(".*"))
    assert not list(tmp_path.glob("*/gpt2_*"))


@pytest.mark.parametrize("words, damage",
                         (("config.json", lambda folder: (folder / "config.json").unlink()),
    ("model.safetensors", lambda folder: (folder / "model.safetensors").unlink()),
    ("not a safetensors file", lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100)),
    ("activation_function is 'relu'", {"activation_function": "relu"}),
                          ("divisible by NH=7", {"n_head": 7}),
    ("model_type is 'bert'", {"model_type": "bert"}), ("h.2.ln_1.weight is missing", {"n_layer": 3}),
    ("wpe.weight has shape .* expected .* from config.json", {"n_positions": 41}),
    ("tensor ln_f.scale and 1 more would",
 {"transformer.ln_f.scale": torch.zeros(1), "score": torch.ones(1)}),
    ("config.json: not the configuration",
 lambda folder: (folder / "config.json").write_text("[" * 9999)),
    *(("n_layer is .*from 1 to 2.31 - 1", {"n_layer": value})
    for value in (0, -1, 1 << 80, 10**400, 2.5, 1e300, "2")),
    ("n_layer is 'x.{0,60}, expected", {"n_layer": "x" * 5000}),
    ("describes a model of", {"n_layer": 10**9}), ("not the configuration", {"n_layer": np.inf}),
    ("not the configuration",
    lambda folder: (folder / "config.json").write_text(f'{{"n_layer": 1{"0" * 9999}}}')),
    ("lm_head.weight differs", {"lm_head.weight": torch.zeros(50, 48)}),
    ("NaN", {"transformer.ln_f.bias": torch.full((48,), torch.nan)})))
def test_hugging_face_folder_faults(tmp_path, hf_folder, words, damage):
    """damage: a function of the folder, settings that config.json has instead, or tensors."""
    shutil.copytree(hf_folder, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "config.json"
    weights = tmp_path / "model.safetensors"
    if callable(damage):
        damage(tmp_path)
    elif "." in next(iter(damage)):
        tensors = {**safetensors.torch.load_file(weights), **damage}
        safetensors.torch.save_file(tensors, weights, metadata={"format": "pt"})
    else:
        config.write_text(json.dumps({**json.loads(config.read_text()), **damage}))
    error = pytest.raises(UserError, e.read_hf_folder, tmp_path)
    assert error.match(words) and "\n" not in str(error.value)
