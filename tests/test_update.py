"""The kernels of an update, on a GPU: sums of gradients, AdamW, outliers, stochastic rounding."""

import functools

import numpy as np
import pytest

import train_gpt2
import train_gpt2_cuda as cuda
from llmc.gpu.device import cp, pinned_array, pointer, to_float32
from llmc.gpu.geometry import blocks
from llmc.outliers import RECENT, z_score
from llmc.tensors import bf16_bits, bf16_to_float32
from llmc.gpu.shares import UPDATE_CHUNK, CHUNKS, Shares
from train_gpt2_cuda import adamw_update, add_gradients, global_norm
from test_kernels import (BF16_TWICE, MODELS, PRECISIONS, SUMS, assert_close, get_device, on_gpu,
                          random, unwritten, weights_of_all_kinds, wide)


def chunks_of(count, decay=0.0, decayed=0, at_random=0):
    """CHUNKS, on the GPU, of `count` parameters of one GPU, of which the first `decayed` decay."""
    chunks = np.zeros(blocks(count, UPDATE_CHUNK), CHUNKS)
    chunks["local"] = chunks["flat"] = chunks["received"] = UPDATE_CHUNK * np.arange(chunks.size)
    chunks["count"], chunks["index"] = np.minimum(UPDATE_CHUNK,
                                                  count - chunks["flat"]), np.arange(chunks.size)
    chunks["decay"] = np.where(chunks["flat"] < decayed, decay, 0.0)
    chunks["rate"] = 1.0
    chunks["at_random"] = at_random
    return on_gpu(chunks.view(np.uint8))


@pytest.mark.parametrize("precision", ("tf32", "bf16", "bf16-float32-grads"))
@pytest.mark.parametrize("ranks", (1, 2, 3, 4))
def test_add_gradients(gpu, ranks, precision):
    """Three micro-batches in the order of ranks, to the bit; global_norm and adamw_update add the
    last."""
    config = MODELS[1]
    precision = PRECISIONS[precision]
    device = get_device(gpu, config, precision)
    shares = Shares(train_gpt2.parameter_table(config), ranks)
    grads = random(3, ranks, shares.size, dtype=precision.grads)
    partials = np.zeros(shares.chunks(0)[2])
    squares = 0.0
    for rank in range(ranks):
        chunks = on_gpu(shares.chunks(rank)[0].view(np.uint8))
        sums = unwritten(shares.share_size(rank))
        m, v = cp.zeros((2, shares.size), np.float32)
        parts = cp.zeros(partials.size, np.float32)
        control = cp.zeros(5, np.int64)
        control.view(np.float32)[7] = 1.0  # grad_scale
        for batch in range(3):
            received = np.full(shares.received_size(), np.nan, grads.dtype)
            for piece in shares.parts_of(rank):
                arrived = grads[batch, :, piece.begin : piece.begin + piece.size]
                received[piece.received : piece.received + arrived.size] = arrived.reshape(-1)
            received = on_gpu(received, dtype=precision.grads)
            if batch < 2:
                add_gradients(device, sums, received, chunks, ranks, batch == 0)
                expected = functools.reduce(np.add, grads[: batch + 1].reshape(-1, shares.size))
                assert np.array_equal(sums.get(), shares.take(expected, rank))
        global_norm(device, parts, sums, received, chunks, ranks)
        expected = functools.reduce(np.add, grads.reshape(-1, shares.size))
        params = on_gpu(random(shares.size), dtype=precision.dtype)
        adamw_update(device, params, None, m, v, sums, received, chunks, ranks, control, 0.0, 0.5,
                     0)
        assert np.array_equal(m.get()[: sums.size], shares.take(expected, rank)), "beta1 is 0"
        assert not partials[np.flatnonzero(parts.get())].any(), "a chunk has one owner"
        partials += parts.get()
        squares = (expected.astype(np.float64) ** 2).sum()
    assert abs(partials.sum() - squares) <= 1e-5 * squares


@pytest.mark.parametrize("grad_clip", (0.0, 1.0))
@pytest.mark.parametrize("precision, has_master", (("tf32", False), ("bf16", True), ("bf16", False),
                                                   ("bf16-float32-grads", True)))
def test_update(gpu, grad_clip, precision, has_master):
    """loss_mean, global_norm, prepare_update and three steps of adamw_update, with two different
    weight decays."""
    device = get_device(gpu, MODELS[1], PRECISIONS[precision])
    e = device.precision.dtype
    g = device.precision.grads
    count = 8 * 123457
    learning_rate = 1e-3
    beta1, beta2, eps = 0.9, 0.95, 1e-8
    decay = 0.1
    master = random(count, seed=1, dtype="float32" if has_master else e)
    m = random(count, seed=2, spread=0.1)
    v = random(count, seed=3) ** 2
    grads = random(count, seed=4, dtype=g)
    losses = random(3, 97, seed=5) ** 2
    weights = weights_of_all_kinds(3, 97)
    weigh = np.float32(1.25)  # what makes up for their sum
    loss_expected = weigh * np.mean(weights * losses, dtype=np.float64)
    split = 3 * UPDATE_CHUNK
    expected = wide(master, m, v)
    params, *on = on_gpu(master, dtype=e), *on_gpu(master, m, v)
    chunks = chunks_of(count, decay, split)
    control = cp.zeros(5, np.int64)
    loss = unwritten(1)
    partials = unwritten(blocks(count, UPDATE_CHUNK))
    reports = pinned_array(32).view(np.float32).reshape(2, 4)
    rate_and_scale = on_gpu(np.float32([learning_rate, weigh]))
    norm = weigh * float(np.sqrt((grads.astype(np.float64) ** 2).sum()))
    scale = weigh * (grad_clip / norm if grad_clip and norm > grad_clip else 1.0)
    for step in (1, 2, 3, 4):
        reports[:] = np.nan
        cuda.loss_mean(device, loss, on_gpu(losses), on_gpu(weights), 1.0 / losses.size,
                       losses.size)
        global_norm(device, partials, None, on_gpu(grads, dtype=g), chunks, 1)
        if step == 4:
            (partials if grad_clip else loss).fill(np.nan)  # the weights must stay as they are
        device.launch("prepare_update", (1,), (256,), control, pointer(reports), loss, partials,
                      rate_and_scale, np.float64(beta1), np.float64(beta2), np.float64(eps),
                      grad_clip, 1, partials.size, None, 0.0, 0.0)
        adamw_update(device, params, on[0] if has_master else None, on[1], on[2], None,
                     on_gpu(grads, dtype=g), chunks, 1, control, beta1, beta2, 0)
        device.stream.synchronize()
        reported = reports[(step - 1) % 2]
        if step == 4:
            assert np.isnan(reported[1 if grad_clip else 0])
            break
        assert abs(reported[1] - norm) <= 1e-5 * norm
        assert abs(reported[0] - loss_expected) <= 1e-6 * losses.mean()
        for part, d in ((slice(0, split), decay), (slice(split, count), 0.0)):
            train_gpt2.adamw_update(*(array[part] for array in expected), *wide(grads[part]),
                                    learning_rate, beta1,
                                    beta2, eps, d, scale, step, part.stop - part.start)
    assert control.get()[:2].tolist() == [3, 4], "updates done, steps begun"
    assert_close(SUMS, m=(on[1], expected[1]), v=(on[2], expected[2]))
    exact = e == "float32" or has_master  # else rounded three times
    assert_close(SUMS if exact else BF16_TWICE, params=(params, expected[0]))
    if has_master:
        assert_close(SUMS, master=(on[0], expected[0]))
        assert np.array_equal(params.get(),
                              bf16_bits(on[0].get())), "the weights are the masters, rounded to nearest"


def test_outliers_are_skipped(gpu):
    """z-scores are outliers.py's, and an update that has too large a one changes nothing."""
    device = get_device(gpu, MODELS[1], PRECISIONS["tf32"])
    losses, norms = (np.float32(3.0) + random(300, seed=seed, spread=0.1) for seed in (1, 2))
    losses[[150, 299]] = 30.0
    norms[[200, 250]] = (40.0, np.inf)
    count = 1000
    expected = np.zeros(2, RECENT)
    on_host = pinned_array(32).view(np.float32).reshape(2, 4)
    control = cp.zeros(5, np.int64)
    recent = cp.zeros(2 * RECENT.itemsize, np.uint8)
    rate_and_scale = on_gpu(np.float32([1e-3, 1]))
    chunks = chunks_of(count)
    params, m, v, grads = on_gpu(*(random(count, seed=seed) ** 2 for seed in range(4)))
    skipped = []
    for step, (loss, norm) in enumerate(zip(losses, norms)):
        before = params.get()
        device.launch("prepare_update", (1,), (256,), control, pointer(on_host),
                      on_gpu(np.float32([loss])),
                      on_gpu(np.float32([norm]) ** 2), rate_and_scale, np.float64(0.9),
                      np.float64(0.95), np.float64(1e-8), 0.0, 1, 1, recent, 5.0, 7.0)
        adamw_update(device, params, None, m, v, None, grads, chunks, 1, control, 0.9, 0.95, 0)
        device.stream.synchronize()
        report = on_host[step % 2]
        z_scores = [z_score(row, x) for row, x in zip(expected, report[:2])]
        np.testing.assert_allclose(report[2:], z_scores, rtol=1e-5, atol=1e-6)
        assert recent.get().tobytes() == expected.tobytes()
        if np.array_equal(before, params.get()):
            skipped.append(step)
    assert skipped == [150, 200, 250, 299] and control.get()[0] == 300


def test_stochastic_rounding(gpu):
    """Each weight becomes one of its two neighbours, their mean is the weight; a seed repeats its
    choices."""
    device = get_device(gpu, MODELS[1], PRECISIONS["bf16"])
    count = 8 * 20000
    # three tenths of the way from one neighbour to the next
    numbers = np.full(count, 1.0 + 0.3 * 2.0**-7, np.float32)
    numbers[count // 2 :] *= -1
    # learning rate 0: the weights stay what they are, but for the rounding
    control = cp.zeros(5, np.int64)
    zeros = cp.zeros(count, np.uint16)

    def rounded(seed, step, at_random=0):
        params = unwritten(count, dtype="bfloat16")
        master = on_gpu(numbers)
        m = cp.zeros(count, np.float32)
        v = cp.ones(count, np.float32)
        control[0] = step
        chunks = chunks_of(count, at_random=at_random)
        adamw_update(device, params, master, m, v, None, zeros, chunks, 1, control, 0.5, 0.5, seed)
        assert np.array_equal(master.get(), numbers, equal_nan=True)
        return to_float32(params)

    first = rounded(7, 1)
    assert set(np.abs(first).tolist()) == {1.0, 1.0 + 2.0**-7}
    for part in (first[: count // 2], first[count // 2 :]):
        assert abs(np.mean(np.abs(part) > 1.0) - 0.3) < 5 * (0.21 / part.size) ** 0.5
    assert np.array_equal(first, rounded(7, 1))
    for other in (rounded(8, 1), rounded(7, 2)):
        assert (abs(np.mean(first == other) - 0.58)
                < 0.02), "other seeds and steps choose independently"
    assert np.array_equal(rounded(0, 1), bf16_to_float32(bf16_bits(numbers))), "seed 0: to nearest"
    assert abs(np.mean(np.abs(rounded(0, 1, at_random=1)) > 1.0) - 0.3) < 0.01, "but for layernorms"
    numbers[:] = np.resize(np.float32([np.nan, np.inf, -np.inf]), count)
    assert np.array_equal(rounded(7, 1), numbers, equal_nan=True), "what is not finite stays so"
