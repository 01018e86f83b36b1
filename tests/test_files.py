"""Files of models, states and tokenizers: their layout, round trips, how they are written."""

import dataclasses
import errno
import functools
import os
import threading

import numpy as np
import pytest

from conftest import GPT2_124M, SMALL, make_state, random_params
from llmc.checkpoint import (read_model, write_model)
from llmc.debugstate import check_tensor, fingerprint, read_debug_state, write_debug_state
from llmc.errors import UserError
from llmc.files import HEADER_BYTES, replacing
from llmc.sampler import Random, Writer
from llmc.tensors import allocate, bf16_bits, bf16_to_float32, check_finite, flat, table_elements, unpadded
from llmc.tokenizer import Tokenizer
from train_gpt2 import GPT2, activation_table, parameter_table


def test_layout_is_llm_c_s():
    """The order of the tensors, and the sizes of 124M."""
    params = allocate(parameter_table(GPT2_124M))
    assert [*params.table] == ("wte wpe ln1w ln1b qkvw qkvb attprojw attprojb ln2w ln2b fcw fcb"
                               " fcprojw fcprojb lnfw lnfb").split()
    assert (sum(x.size for x in unpadded(params, GPT2_124M.V)) == 124439808
            and params.buffer.ctypes.data % 64 == 0)
    assert table_elements(parameter_table(GPT2_124M)) == 124475904
    assert table_elements(activation_table(GPT2_124M, 4, 64)) == 73323776


@pytest.mark.parametrize("version, rows",
                         ((1, SMALL.V), (3, SMALL.V), (3, SMALL.Vp), (5, SMALL.Vp)))
def test_model_round_trip(tmp_path, version, rows):
    """A file without padding gets it; what stands in it takes no part."""
    path = tmp_path / "model.bin"
    params = random_params(SMALL)
    written = dataclasses.replace(SMALL, Vp=rows)
    want = bf16_to_float32(bf16_bits(flat(params))) if version == 5 else flat(params).copy()
    params.wte[SMALL.V :] = 5.0
    write_model(path, written, params, version)
    config, read = read_model(path, GPT2)
    assert config == SMALL and np.array_equal(flat(read), want)
    size = 2 if version == 5 else 4
    assert path.stat().st_size == HEADER_BYTES + size * table_elements(parameter_table(written))
    header = np.fromfile(path, "<i4", 256)
    sizes = [SMALL.maxT, SMALL.V, SMALL.L, SMALL.NH, SMALL.C, 0 if version == 1 else rows]
    assert header[:8].tolist() == [20240326, version, *sizes]
    assert not header[8:].any()
    assert (fingerprint(config, read)
            == fingerprint(SMALL, params)), "one model, whatever the version"
    if version == 5:  # also of bfloat16 bits, in which a NaN is found
        bits = allocate(parameter_table(config, "bfloat16"))
        flat(bits)[:] = bf16_bits(flat(read))
        for name, tensors in (("a.bin", read), ("b.bin", bits)):
            write_model(tmp_path / name, config, tensors, version)
        assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
        check_finite("here", bits, "")
        bits.qkvb[1, 5] = 0x7FC0
        pytest.raises(UserError, check_finite, "here", bits,
                      "").match("here: tensor qkvb holds NaN")


def test_bf16_rounds_to_nearest_even():
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).standard_normal(100000, dtype=np.float32)
    bits = [0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x80000000, 0x00000001]
    values = np.concatenate((x, np.array(bits, np.uint32).view(np.float32)))
    assert np.array_equal(bf16_to_float32(bf16_bits(values)),
                          torch.from_numpy(values).bfloat16().float().numpy())


@pytest.mark.parametrize("version", (1, 2))
def test_debug_state_round_trip(tmp_path, version):
    path = tmp_path / "state.bin"
    params = random_params(SMALL)
    state = make_state(params)
    write_debug_state(path, SMALL, state, version)
    # in llm.c's order
    parts = state.x, state.y, state.logits, np.float32(state.loss), state.grads.wte[0]
    assert path.read_bytes()[HEADER_BYTES:].startswith(b"".join(part.tobytes() for part in parts))
    read = read_debug_state(path, SMALL, params)
    assert (np.array_equal(read.losses, state.losses)
            and np.array_equal(flat(read.grads), flat(state.grads)))
    assert (read.loss, read.optimizer, read.crc) == (state.loss, state.optimizer, state.crc)
    data = bytearray(path.read_bytes()[: -(40 + 40)])  # as llm.c writes it: without a trailer
    data[32:44] = bytes(12)  # header ints [8] to [10]
    path.write_bytes(data)
    read = read_debug_state(path, SMALL, params)
    assert read.losses is None and read.optimizer is None
    assert not check_tensor("another shape", state.logits[None], state.logits, np.inf)


def test_what_a_token_prints(capsysbinary):
    """Text, also of characters that span tokens, but nothing that a terminal would obey."""
    ascii = [bytes([i]) for i in range(128)]
    for tokens, printed in ((ascii, bytes([*range(9, 14), *range(32, 127)])),
                            (["ü".encode()[:1], "ü".encode()[1:], b"<|x|>"], "ü<|x|>".encode()),
                            ([b"a\x1b]0;b", "\u009b\u202ec".encode()], b"a]0;bc")):
        writer = Writer(Tokenizer(tokens, 0))
        for id in range(len(tokens)):
            writer.write(id)
        writer.end()
        assert capsysbinary.readouterr().out == printed + b"\n"


def test_random_stream_is_llm_c_s():
    random = Random()
    assert ([random.u32() for _ in range(5)]
            == [989205090, 818269915, 1335155955, 3876892996, 2941700015])
    assert Random().f32() == (989205090 >> 8) / 16777216.0


def test_replacing(tmp_path, at_call):
    """The old file stays when writing fails; a new one is on the disk before it has its name; a
    link is followed."""
    path = tmp_path / "file"
    done = []
    path.write_bytes(b"old")
    with pytest.raises(UserError, match="file: cannot be written .No space left on device"):
        with replacing(path) as f:
            f.write(b"new, but not all of it")
            raise OSError(errno.ENOSPC, "No space left on device")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]
    (tmp_path / "file.tmp").write_bytes(b"longer, of a process that was killed")
    (tmp_path / "link").symlink_to(path)
    for name in ("fsync", "replace"):
        at_call(os, name, 0, functools.partial(done.append, name))
    with replacing(tmp_path / "link") as f:
        f.write(b"new")
    assert path.read_bytes() == b"new" and done == ["fsync", "replace"]
    assert (tmp_path / "link").is_symlink() and sorted(os.listdir(tmp_path)) == ["file", "link"]


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    """So does a device, such as /dev/null; what is neither that nor a file is refused."""
    pipe = tmp_path / "pipe"
    read = []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    with replacing(pipe) as f:
        f.write(b"new")
    reader.join()
    assert read == [b"new"] and pipe.is_fifo() and os.listdir(tmp_path) == ["pipe"]
    with pytest.raises(UserError, match="written .a directory or a device, expected a file"):
        with replacing(tmp_path):
            pass
