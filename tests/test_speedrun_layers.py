"""The speed run's layers against finite differences in float64; a step of Muon beside PyTorch's."""

import numpy as np
import pytest

import train_speedrun as t
from llmc.debugstate import check_tensor
from test_layers import assert_gradients, forward_of, nan, normal

torch = pytest.importorskip("torch")

from reference_optimizers import MuonAndAdamW, muon


@pytest.mark.parametrize("tokens", (2**17 - 1, 2**17))
@pytest.mark.parametrize("shape", ((16, 48), (48, 16)))
def test_a_step_of_muon_is_pytorch_s(tokens, shape):
    """Of few tokens and of many."""
    # weights, gradient, momentum
    ours = np.random.default_rng(0).standard_normal((3, *shape), dtype=np.float32)
    param, grad, m = torch.tensor(ours, dtype=torch.float64)
    muon(param, grad, m, 0.1, 0.5, *MuonAndAdamW.steps_for(tokens))
    steps = t.newton_schulz_of(t.SpeedrunSettings(B=1, T=tokens))
    t.muon_update(ours[0], ours[2], 2 * ours[1], 0.1, t.Muon.MOMENTUM, 0.5, 0.5, steps)
    assert check_tensor("m", ours[2], m.numpy(), 1e-6)
    assert check_tensor("param", ours[0], param.numpy(), 1e-5)


@pytest.mark.parametrize("N", (1, 7, 1000))
def test_squared_relu(N):
    inp = normal(N)
    dout = normal(N, seed=3)
    forward = forward_of(t.relu2_forward, nan(N), inp, N)
    assert check_tensor("out", forward(), np.where(inp > 0, inp**2, 0.0), 1e-12)
    dinp = nan(N)
    t.relu2_backward(dinp, inp, dout, N)
    assert_gradients(forward, dout, dinp=(dinp, inp))
    t.relu2_backward(dout, inp, dout, N)  # in place, as the model calls it
    assert check_tensor("dinp, in place,", dout, dinp, 0.0)


@pytest.mark.parametrize("N", (1, 7, 1000))
def test_cap(in_blocks, N):
    z = 20.0 * normal(N)
    dlogits = normal(N, seed=3)

    def forward():
        logits = z.copy()
        t.cap_forward(logits, N)
        return logits

    logits = forward()
    assert check_tensor("logits", logits, t.CAP * z / np.sqrt(z**2 + t.CAP**2), 1e-5)
    got = dlogits.copy()
    t.cap_backward(got, logits, N)
    assert_gradients(forward, dlogits, dlogits=(got, z))
    largest = np.float32([t.CAP * (1 + 2.0**-23), -t.CAP])  # as rounding may leave it
    slope = np.ones(2, np.float32)
    t.cap_backward(slope, largest, 2)
    assert check_tensor("the slope at the cap", slope, np.zeros(2), 0.0)


@pytest.mark.parametrize("B, T, NH, HS", ((1, 1, 1, 2), (2, 5, 3, 4)))
def test_qknorm(B, T, NH, HS):
    """The values stay."""
    x = normal(B, T, 3 * NH * HS)
    dout = normal(B, T, 3 * NH * HS, seed=3)
    rstd = nan(B, T, 2 * NH)

    def forward():
        out = x.copy()
        t.qknorm_forward(out, rstd, B, T, NH, HS)
        return out

    heads = x.reshape(B, T, 3 * NH, HS)[:, :, : 2 * NH]
    expected = x.copy().reshape(B, T, 3 * NH, HS)
    expected[:, :, : 2 * NH] /= np.sqrt(np.square(heads).mean(-1, keepdims=True) + t.EPS)
    expected[:, :, :NH] *= t.SCALE * np.sqrt(HS)
    out = forward()
    assert check_tensor("qkv", out, expected.reshape(x.shape), 1e-6)
    got = dout.copy()
    t.qknorm_backward(got, out, rstd, B, T, NH, HS)
    assert_gradients(forward, dout, dqkv=(got, x))
