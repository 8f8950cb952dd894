"""Claim: a flow's log-determinants are exact, and a fitted flow has the moments of its target."""

import pytest
import torch
from torch import Tensor

from privmix.laboratory.heads.expm_nf import FitSettings, fit, release
from privmix.laboratory.heads.flows import Flow, FlowSettings


def perturbed(settings: FlowSettings, dimension: int) -> Flow:
    torch.manual_seed(0)
    flow = Flow(dimension, settings).double()
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(torch.randn_like(parameter))
    return flow


def test_log_determinants_are_those_of_autograd() -> None:
    flow = perturbed(FlowSettings(layers=3, sigma=1.0), 5)
    points = 3 * torch.randn(20, 5, dtype=torch.float64)
    _, log_determinants = flow(points)
    for point, own in zip(points, log_determinants, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda z: flow(z[None])[0][0], point)
        sign, expected = jacobian.slogdet()
        assert sign > 0
        assert abs((own - expected).item()) < 1e-6


def test_a_density_is_that_of_what_a_draw_came_from() -> None:
    flow = perturbed(FlowSettings(layers=4, sigma=2.0), 3)
    z = 2 * torch.randn(50, 3, dtype=torch.float64)
    values, log_determinants = flow(z)
    base = torch.distributions.Normal(torch.zeros(()).double(), 2.0)
    torch.testing.assert_close(flow.layers.inverse(values), z, atol=1e-9, rtol=0)
    torch.testing.assert_close(flow.log_density(values), base.log_prob(z).sum(dim=1) - log_determinants)


def banana(theta: Tensor) -> Tensor:
    """Returns minus the log-density of x ~ N(0, 1), y ~ N(x^2 / 2, 1), up to a constant."""
    return 0.5 * theta[:, 0] ** 2 + 0.5 * (theta[:, 1] - 0.5 * theta[:, 0] ** 2) ** 2


@pytest.mark.slow
def test_a_flow_fits_a_banana() -> None:
    torch.manual_seed(0)
    flow = Flow(2, FlowSettings(layers=12, sigma=1.0)).double()
    fit([flow], banana, FitSettings(samples=200, learning_rate=0.02, steps=800))
    drawn = release(flow, 20_000, seed=1)
    # E_q[log q - log p], where log q(f(z)) = log N(z) - log |det df/dz|; the constants log 2 pi cancel.
    z = torch.randn(20_000, 2, dtype=torch.float64)
    values, log_determinants = flow(z)
    divergence = float((banana(values) - 0.5 * z.square().sum(dim=1) - log_determinants).mean())
    assert -0.02 < divergence < 0.1
    torch.testing.assert_close(drawn.mean(0), torch.tensor([0.0, 0.5]).double(), atol=0.12, rtol=0)
    torch.testing.assert_close(drawn.T.cov(), torch.diag(torch.tensor([1.0, 1.5])).double(), atol=0.3, rtol=0)
