"""What bad input gets: one line that names the file or flag, exit status 1, nothing half-written
and nothing lost."""

import dataclasses
import os
import re
import shlex
import subprocess
import sys
import zlib
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import llmc.checkpoint
import llmc.files
import train_gpt2
from conftest import (ROOT, SMALL, SMALL_LLAMA, assert_one_line_error, make_state, optimizer_of,
                      random_params)
from llmc.checkpoint import owned_by_one, Progress, read_model, write_model
from llmc.dataloader import write_tokens
from llmc.errors import UserError
from llmc.files import MODEL_MAGIC, OPTIMIZER_MAGIC
from llmc.resume import checkpoint_paths, complete_checkpoints, read_notes, save_checkpoint
from llmc.shuffle import Position
from llmc.tensors import bf16_bits, bf16_to_float32, flat
from llmc.tokenizer import read_tokenizer, write_tokenizer
from llmc.debugstate import read_debug_state, write_debug_state
from train_gpt2 import GPT2
from train_llama3 import Llama3

TRAIN = ("-b", 2, "-t", 8, "-x", 1, "-v", 0, "-s", 0)


@pytest.fixture
def train(run_here):
    """train(flag, ...): a short run of the trainer, in this process; returns how it ended."""
    return lambda *flags, check=False: run_here(train_gpt2, *TRAIN, *flags, check=check)


def patch_header(path, **fields):
    """Overwrite header ints: patch_header(path, h4=0) sets slot 4."""
    for slot, value in fields.items():
        np.memmap(path, "<i4", "r+", 4 * int(slot[1:]), shape=1)[0] = value


FILES = {  # name: what makes it
    **dict.fromkeys(("gpt2_124M.bin", "gpt2_tokenizer.bin"), "python export_weights.py"),
    **{f"data/tiny_shakespeare_{split}.bin": "python prepro_tinyshakespeare.py"
       for split in ("train", "val")}}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ("missing", "directory", "empty", "another kind", "unreadable"))
def test_input_files(workplace, name, damage, train):
    path = workplace / name
    mend = FILES[name]
    content = path.read_bytes()
    path.unlink()
    {"missing": lambda: None, "directory": path.mkdir, "empty": path.touch,
     "another kind": lambda: path.write_bytes(np.int32(OPTIMIZER_MAGIC).tobytes() + content[4:]),
     # by a link to itself, which not even root can read
     "unreadable": lambda: path.symlink_to(path)}[damage]()
    if damage == "missing" and "tokenizer" in name:
        assert "warning" not in train(check=True).stderr, "it draws no text"
        warning = train("-s", 20, check=True).stderr
        assert "warning" in warning and name in warning and mend in warning
        return
    if damage == "empty" and "data" in name:
        mend = "at least 17" if "train" in name else "at least 9"
    elif damage == "another kind":
        mend = "optimizer state"
    if "val" in name:
        assert train().returncode == 0, "with -v 0, nobody reads it"
    assert_one_line_error(train("-v", 1), name, mend)


def test_files_of_another_size_and_weights_that_are_not_finite(workplace):
    model_path = workplace / "gpt2_124M.bin"
    state_path = workplace / "state.bin"
    write_debug_state(state_path, SMALL, make_state(random_params(SMALL)))
    pytest.raises(UserError, read_debug_state, state_path, SMALL,
                  random_params(SMALL, 1)).match("another model")
    for path, read in ((model_path, lambda: read_model(model_path, GPT2)),
                       (state_path,
                        lambda: read_debug_state(state_path, SMALL, random_params(SMALL)))):
        data = path.read_bytes()
        for size in (1, 3, 1023, 1024, len(data) // 2, len(data) - 1, len(data) + 1):
            path.write_bytes((data + b"x")[:size])
            pytest.raises(UserError, read).match(f"{path.name}: {size} bytes, expected")
    for bits in (0x7FC00000, 0x7F800000):  # NaN, infinity
        write_model(model_path, SMALL, random_params(SMALL))
        patch_header(model_path, h300=bits)
        pytest.raises(UserError, read_model, model_path,
                      GPT2).match(f"{model_path}: tensor wte holds NaN or infinite")


def test_what_is_beyond_a_file_s_first_chunk(here, monkeypatch):
    """Is written, read and checked like the rest; of model files of each version, and of states."""
    monkeypatch.setattr(llmc.files, "FILE_CHUNK", 1000)  # fcw has five, the last one smaller
    params = random_params(SMALL)
    for version in (1, 3, 5):
        write_model("model.bin", SMALL, params, version)
        expected = bf16_to_float32(bf16_bits(flat(params))) if version == 5 else flat(params)
        assert np.array_equal(flat(read_model("model.bin", GPT2)[1]), expected)
        data = bytearray(Path("model.bin").read_bytes())
        data[-2:] = b"\xff\xff"  # NaN: the last number of lnfb
        Path("model.bin").write_bytes(data)
        pytest.raises(UserError, read_model, "model.bin", GPT2).match("tensor lnfb holds NaN")
    params.fcw[-1, -1, -1] = np.inf
    write_model("model.bin", SMALL, params)
    pytest.raises(UserError, read_model, "model.bin", GPT2).match("tensor fcw holds NaN or inf")
    owned = owned_by_one(optimizer_of(random_params(SMALL), params))
    pytest.raises(UserError, owned.check, "state", "mend").match("the optimizer's v: NaN or inf")


def test_a_checkpoint_s_files_are_on_the_disk_in_their_order(workplace, train, monkeypatch):
    """Each is complete on the disk before it has its name. The marker is the last one, and is the
    first to be deleted."""
    synced = []
    calls = []
    fsync = os.fsync
    replace = os.replace
    unlink = os.unlink

    def noted_fsync(descriptor):
        fsync(descriptor)
        status = os.fstat(descriptor)
        synced.append((status.st_ino, status.st_size))

    def noted_replace(source, target):
        status = os.stat(source)
        calls.append((os.path.basename(target), (status.st_ino, status.st_size) in synced))
        replace(source, target)

    def noted_unlink(path):
        calls.append((os.path.basename(path), "deleted"))
        unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", noted_fsync)
        patch.setattr(os, "replace", noted_replace)
        patch.setattr(os, "unlink", noted_unlink)
        train("-x", 2, "-n", 1, "-nk", 1, "-o", "run", check=True)
    model, state, marker = checkpoint_paths("", 1)
    second = checkpoint_paths("", 2)
    assert [call for call in calls if re.search(r"_0000000\d", call[0])] == [
        *((name, True) for name in (model, state, marker, *second)),
        *((name, "deleted") for name in (marker, state, model))]


@pytest.mark.parametrize("call", range(3))
def test_a_run_killed_while_it_deletes_a_checkpoint(workplace, train, at_call, call):
    """leaves no marker without a model."""
    flags = ("-n", 1, "-nk", 1, "-o", "run")
    at_call(os, "unlink", call, Mock(side_effect=KeyboardInterrupt))
    assert train("-x", 2, *flags).returncode == 130
    assert all(Path(path).exists() for step in complete_checkpoints("run")
               for path in checkpoint_paths("run", step))


@pytest.mark.parametrize("slot, name", enumerate(("version", "maxT", "V", "L", "NH", "C", "Vp"), 1))
def test_model_header_fields(workplace, monkeypatch, slot, name):
    """A huge field must not be believed: the check is arithmetic, before anything is allocated."""
    path = workplace / "gpt2_124M.bin"
    monkeypatch.setattr(llmc.checkpoint, "allocate", lambda table: pytest.fail("allocated"))
    impossible = {1: [(2, "version 2.* 1, 3 or 5"), (4, "version 4")],
                  5: [(5, "C=24 is not divisible by NH=5")],
                  7: [(256, "Vp=256 is smaller than V=257")]}
    for value, words in ((0, name), (-1, name), (2**31 - 1, "expected|divisible|smaller"),
                         *impossible.get(slot, ())):
        patch_header(path, **{f"h{slot}": value})
        error = pytest.raises(UserError, read_model, path, GPT2)
        assert error.match(words) and str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_llama_s_original_length(tmp_path):
    """It counts only where RoPE is scaled."""
    path = tmp_path / "llama.bin"
    for factor, original, words in ((8, 0, "original=0"), (8, -1, "original=-1"), (0, 0, "")):
        config = dataclasses.replace(SMALL_LLAMA, factor=factor, original=original)
        write_model(path, config, random_params(config))
        if words:
            pytest.raises(UserError, read_model, path, Llama3).match(words)
        else:
            assert read_model(path, Llama3)[0] == config


def test_tokenizer_faults(workplace):
    path = workplace / "gpt2_tokenizer.bin"
    good = path.read_bytes()
    for words, data, header in (("1000 bytes, expected a tokenizer with a 1024-byte header",
                                 good[:1000], {}),
            ("is damaged", good[:1024] + b"\x00" + good[1025:], {}),
                                ("of 257 tokens", good[:-1], {}),
            ("of 257 tokens", good + b"x", {}), ("version 3", good, dict(h1=3)),
                                ("of 0 tokens", good, dict(h2=0)),
            ("end of text 257", good, dict(h3=257))):
        path.write_bytes(data)
        patch_header(path, **header)
        pytest.raises(UserError, read_tokenizer, path).match(words)


def test_the_data_s_vocabulary_is_not_the_model_s(workplace, train):
    """The file beside the data is taken, unless another is given."""
    write_tokenizer("data/tiny_shakespeare_tokenizer.bin", [b"a", b"b"], 1)
    assert_one_line_error(train(), "data/tiny_shakespeare_tokenizer.bin", "2 tokens", "V=257",
                          "--tokenizer")
    assert_one_line_error(train("-e", "d2"), "data/tiny_shakespeare_train.bin", "token id",
                          "expected 0 to 1")
    assert train("--tokenizer", "gpt2_tokenizer.bin").returncode == 0
    assert_one_line_error(train("-e", "d3"), "d3",
                          "expected one of d2, d4, d6, d12, d24, d36, d48, c1536")


def test_token_file_faults(workplace, train):
    path = workplace / "data/tiny_shakespeare_train.bin"
    tokens = range(40)
    for words, ids, size, header in (  # of uint16 tokens, with a header, is the file of 1104 bytes
            (("162 bytes", "whole number"), tokens, 162, {}),
            (("16 tokens", "17"), range(16), 64, {}),
            (("token id 257", "256"), [*tokens, 257], 164, {}),
            (["token id -3"], [*tokens, -3], 164, {}),
            (("1103 bytes", "expected 1104"), tokens, 1103, {}),
            (["version 2"], tokens, 1103, {"h1": 2}),
            (("4294967291 uint16 tokens", "cut short"), tokens, 1103, {"h2": -5})):
        write_tokens(path, [np.array(ids)], len(ids), "uint16" if size == 1103 else "int32")
        os.truncate(path, size)
        patch_header(path, **header)
        assert_one_line_error(train(), path.name, *words)


@pytest.mark.parametrize("flags, words", (
    ("-b 0", "-b/--batch_size 0.*at least 1"), ("-t 33", "-t/--sequence_length 33.*32"),
    ("-y 1", "-y.*-o DIR"),
    ("-l nan", "-l/--learning_rate nan"), ("--eps 1e-46", "--eps 1e-46.*expected"),
    ("-q 2", "-q/--final_fraction 2"),
    ("-e ''", "'': no such file"), ("--beta1 1", "--beta1 1.*expected 0 <= beta1 < 1"),
    ("-d 17", "-d/--total_batch_size 17.*multiple of B*T = 16"),
    ("-y 1 -o run.log", "-y.*run.log is a log file"), ("-b 1000000", "tokens.*-b or -t"),
    ("-i nothing_*.bin -j x.bin", "nothing_*.bin.*no file matches"),
    ("-i shards.bin -v 1", "shards.bin.*-j"),
    ("-o run -e none.bin", "none.bin.*the directory of a run"),
    ("--tokenizer none.bin", "none.bin: no such file"),
    (f"-i {__file__}", f"python prepro_text.py {__file__} --output data/mine, then -i data/mine"),
    ("-i data/foo", "data/foo_train.bin: no such file.*prepro_text.py FILE --output data/foo"),
    ("-x 1 -l 1e30 -v 1 --final_reports 1", "step 1: the validation loss is nan"),
    ("-x 50 -l 1e30", "loss is nan.*-l"),
    ("-o gpt2_tokenizer.bin", "gpt2_tokenizer.bin: cannot be made a directory")))
def test_flags(workplace, flags, words, train):
    """Nothing is written, nor written over."""
    Path("data/x_train_0.bin").touch()
    assert_one_line_error(train(*shlex.split(flags)), *words.split(".*"))
    assert not list(workplace.glob("run/*")) and read_tokenizer("gpt2_tokenizer.bin")


@pytest.mark.parametrize("flags, says", (
    ("--lr 0.001", "unrecognized arguments: --lr 0.001; --help lists all flags"),
    ("-x y", "-x/--steps: invalid int"),
    ("-i a_train_0.bin a_train_1.bin",
     "arguments: a_train_1.bin; --help lists all flags, and a glob needs quotes")))
def test_flags_that_are_none(workplace, train, flags, says):
    done = train(*flags.split())
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and says in done.stderr


@pytest.mark.parametrize("value", (np.nan, np.inf))
def test_gradients_that_are_not_finite_change_no_weight(workplace, train, monkeypatch, value):
    """The run stops; its last checkpoint stands, also if the update would be its last one."""
    flags = ("-n", 1, "-o", "run", "--grad_clip", 1)
    backward = GPT2.backward_into
    train("-x", 2, *flags, check=True)
    before = {path: path.read_bytes() for path in Path("run").glob("*_0*")}
    monkeypatch.setattr(GPT2, "backward_into", lambda model, grads, *more: (
        backward(model, grads, *more), np.copyto(grads.fcb[0, :1], value)))
    done = train("-x", 3, *flags, "-y", 1)
    assert_one_line_error(done, f"step 3: the gradient norm is {value}", "--grad_clip of 1 or less")
    assert {path: path.read_bytes() for path in Path("run").glob("*_0*")} == before


@pytest.mark.parametrize("which, words", ((0, "tensor qkvb"), (2, "the optimizer's v: NaN")))
def test_weights_or_moments_that_became_nan_are_not_saved(tmp_path, which, words):
    params, m, v = tensors = [random_params(SMALL) for _ in range(3)]
    flat(v)[:] **= 2
    tensors[which].qkvb[0, 0] = np.nan
    run = Mock(output_dir=tmp_path)
    state = (owned_by_one(optimizer_of(m, v)), Progress(3, 1, Position(), (1, 1, 0)))
    pytest.raises(UserError, save_checkpoint, run, SMALL, params, *state,
                  {}).match(f"after 3 steps: {words}")
    assert not list(tmp_path.iterdir())


def test_out_of_memory_is_one_line(workplace, train, monkeypatch):
    monkeypatch.setattr(GPT2, "allocate_activations", lambda *sizes: np.zeros(1 << 50))
    assert_one_line_error(train(), "out of memory")


def test_two_runs_with_one_output(workplace, train):
    """The second one is refused until the first ends, by kill -9, too."""
    command = [sys.executable, str(ROOT / "train_gpt2.py"), *map(str, TRAIN), "-x", "100000", "-o",
               "run"]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert any(line.startswith("step      2/") for line in first.stdout)
    assert_one_line_error(train("-o", "run"), "run", "another run writes there", "another -o")
    first.kill()
    first.communicate()
    assert "step 1/1 " in train("-o", "run", check=True).stdout


def test_what_a_run_resumes_from(workplace, train):
    """A second run neither writes into the first one's directory nor resumes it with other
    flags."""
    for directory in ("run", "other"):
        os.mkdir(directory)
    write_tokenizer("other/tokenizer.bin", [b"a", b"b"], 1)
    assert_one_line_error(train("-o", "other"), "other/tokenizer.bin", "another vocabulary",
                          "another -o")
    assert read_tokenizer("other/tokenizer.bin").tokens == [b"a", b"b"]
    write_tokenizer("data/x_tokenizer.bin", [b"a", b"b"], 1)
    assert_one_line_error(train("-j", "data/x_val.bin"),
                          "data/x_tokenizer.bin is another vocabulary")
    assert "no complete checkpoint" not in train("-x", 1, "-o", "empty", "-y", 1, check=True).stdout
    open("run/main.log", "w").close()
    assert "no complete checkpoint in run" in train("-x", 2, "-o", "run", "-y", 1,
                                                    check=True).stdout
    assert_one_line_error(train("-x", 2, "-o", "run"), "run", "step 2", "-y 1")
    assert_one_line_error(train("-x", 1, "-o", "run", "-y", 1), "step 2", "-x 1")
    assert_one_line_error(train("-x", 3, "-o", "run", "-y", 1, "-b", 1), "-b 2 -t 8", "-b 1 -t 8")


@pytest.mark.parametrize("flags, kept", (
    (("-nk", 3), (5, 6, 7)), (("-nk", 1, "-nm", 3), (3, 6, 7)), (("-nm", 3), range(1, 8))))
def test_old_checkpoints_are_deleted(workplace, train, flags, kept):
    (workplace / "run").mkdir()
    (workplace / "run" / "model_mine.bin").touch()
    train("-x", 4, "-n", 1, "-o", "run", *flags, check=True)
    train("-x", 7, "-n", 1, "-o", "run", "-y", 1, *flags, check=True)
    names = {name for step in kept for name in checkpoint_paths("", step)}
    assert (set(os.listdir("run"))
            == {"main.csv", "main.log", "tokenizer.bin", "model_mine.bin", *names})


def test_logs_that_nobody_keeps(workplace, train):
    """Links to /dev/null stay such."""
    os.mkdir("run")
    for name in ("main.log", "main.csv"):
        Path("run", name).symlink_to("/dev/null")
    train("-x", 1, "-o", "run", check=True)
    train("-x", 2, "-o", "run", "-y", 1, check=True)
    assert Path("run/main.csv").is_symlink() and Path("run/main.csv").is_char_device()


def test_damaged_checkpoints_and_logs(workplace, train):
    """A state that does not say its model's CRC-32 is taken; a log that is none is not written
    over."""
    train("-x", 2, "-n", 1, "-o", "run", check=True)
    model, state, marker = map(Path, checkpoint_paths("run", 2))
    good = state.read_bytes()
    good_model = model.read_bytes()
    again = ("-x", 3, "-o", "run", "-y", 1)

    def fails(*words, data=good, crc=0, **header):
        state.write_bytes(data)
        patch_header(state, h45=crc, **header)
        assert_one_line_error(train(*again), *words)

    fails(state, "bytes, expected", f"remove {marker}", data=good[:-1])
    fails(state, "is a GPT-2 checkpoint", h0=MODEL_MAGIC)
    fails(state, "step -1", f"remove {marker}", h10=-1)
    for slot in (20, 42, 300):  # the sampler's state, a flag, a moment
        flipped = int(np.frombuffer(good, "<i4")[slot]) ^ 1
        header = {f"h{slot}": flipped}
        fails(state, "is damaged (another CRC-32", f"remove {marker}", crc=1, **header)
    fails(state, "--spread 1", "expected", "--spread 0", h42=1)
    fails(state, "step 5", h10=5)
    fails("batch 9999", h32=9999)
    fails(state, "the optimizer's m: NaN", f"remove {marker}", h256=0x7FC00000)  # NaN, first in m
    Path("run", "main.csv").rename("main.csv")
    Path("run", "main.csv").write_text("notes\n")
    fails("main.csv", "not a training log")
    assert Path("run", "main.csv").read_text() == "notes\n"
    Path("main.csv").rename("run/main.csv")
    header = np.frombuffer(good, "<i4", 256)
    assert header[43] == 1 and header[44:45].view("<u4")[0] == zlib.crc32(good_model)
    for bad in (Path(checkpoint_paths("run", 1)[0]).read_bytes(),
                good_model[:-1] + bytes([good_model[-1] ^ 1])):
        model.write_bytes(bad)
        fails(state, model, "CRC-32", f"remove {marker}")
    patch_header(state, h43=0, h44=0)
    assert "resuming at step 2" in train(*again, check=True).stdout


@pytest.mark.parametrize("text", (
    "null", "[]", "3", '"run"', "[1, {}]", "NaN", "{", "\x80", "[" * 9999, '{"model": 3}',
    '{"model": ["d2"]}', '{"update_tokens": "x"}', '{"update_tokens": -1}',
    '{"update_tokens": 1.5}', '{"lowest": 3}', '{"lowest": [1.5]}', '{"lowest": ["a", 2]}',
    '{"recent": {}}', '{"recent": [1, 2]}', '{"recent": [{"count": 1, "values": [2]}, {}]}',
    '{"optimizer": []}', '{"optimizer": {"beta1": [0.9]}}',
    '{"fp8": []}', '{"fp8": {"updates": 1, "history": "0", "scales": "x"}}', '{"val_data": null}',
    '{"data": {}}'))
def test_markers_that_no_run_writes(here, text):
    """Other JSON, or none. llm.c's is empty; fields that are not known are left alone."""
    marker = Path("DONE_00000001")
    marker.write_bytes(text.encode("latin1"))
    pytest.raises(UserError, read_notes, "", 1).match(f"{marker}: .*; remove {marker} to resume")
    for text, notes in (("", {}), ("{}", {}), ('{"later": [1]}', {"later": [1]})):
        marker.write_text(text)
        assert read_notes("", 1) == notes


def test_a_full_disk_is_one_line(workplace):
    command = f"{sys.executable} {ROOT / 'train_gpt2.py'} -b 2 -t 8 -v 0 -s 0 -x 2000 > /dev/full"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert_one_line_error(done, "No space left")


@pytest.mark.parametrize("work", (
    "print('x')", "print('x', end='')", "sys.stdout.buffer.write(b'x')", "print('x' * 99999)",
    "(print('x', end=''), sys.exit(0))"))
def test_output_to_a_full_disk(work):
    """is one line, whatever is printed: no traceback of Python's own at exit, no status of 120."""
    program = ("import sys; from llmc.errors import run_main; sys.argv = ['x.py'];"
               f" run_main(lambda: {work} and None)")
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE,
                              text=True, cwd=ROOT, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (1, "x.py: error: No space left on device\n")
