"""Claim: a flow's density at its samples is exact, and a fitted flow has the moments of its target."""

import math

import pytest
import torch
from torch import Tensor

from privmix.laboratory.heads.expm_nf import FitSettings, fit, release
from privmix.laboratory.heads.flows import Flow, FlowKind, FlowSettings


def perturbed(settings: FlowSettings, dimension: int) -> Flow:
    torch.manual_seed(0)
    flow = Flow(dimension, settings).double()
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(torch.randn_like(parameter))
    return flow


@pytest.mark.parametrize("kind", ["planar", "sylvester"])
def test_log_determinants_are_those_of_autograd(kind: FlowKind) -> None:
    flow = perturbed(FlowSettings(kind=kind, layers=3, sigma=1.0, rank=3, reflections=4), 5)
    points = 3 * torch.randn(20, 5, dtype=torch.float64)
    _, log_determinants = flow(points)
    for point, own in zip(points, log_determinants, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda z: flow(z[None])[0][0], point)
        sign, expected = jacobian.slogdet()
        assert sign > 0
        assert abs((own - expected).item()) < 1e-6


def banana(theta: Tensor) -> Tensor:
    """Returns the log-density of x ~ N(0, 1), y ~ N(x^2 / 2, 1)."""
    return 0.5 * theta[:, 0] ** 2 + 0.5 * (theta[:, 1] - 0.5 * theta[:, 0] ** 2) ** 2


def test_a_flow_fits_a_banana() -> None:
    torch.manual_seed(0)
    flow = Flow(2, FlowSettings(kind="planar", layers=12, sigma=1.0)).double()
    fit([flow], banana, FitSettings(samples=200, learning_rate=0.02, steps=800))
    draws = release(flow, 20_000, seed=1)
    divergence = float((draws.log_density + banana(draws.values)).mean()) + math.log(2 * math.pi)
    assert -0.02 < divergence < 0.1
    torch.testing.assert_close(draws.values.mean(0), torch.tensor([0.0, 0.5]).double(), atol=0.12, rtol=0)
    torch.testing.assert_close(draws.values.T.cov(), torch.diag(torch.tensor([1.0, 1.5])).double(), atol=0.3, rtol=0)


def test_a_flow_fits_a_gaussian_in_50_dimensions() -> None:
    dimension = 50
    generator = torch.Generator().manual_seed(1)
    mean = 0.5 * torch.randn(dimension, generator=generator)
    root = torch.randn(dimension, dimension, generator=generator) / dimension**0.5
    covariance = 0.5 * torch.eye(dimension) + 0.2 * root @ root.T
    precision = covariance.inverse()

    def gaussian(theta: Tensor) -> Tensor:
        return 0.5 * ((theta - mean) @ precision * (theta - mean)).sum(dim=1)

    torch.manual_seed(0)
    flow = Flow(dimension, FlowSettings(kind="sylvester", layers=2, sigma=1.0, rank=dimension, reflections=8))
    fit([flow], gaussian, FitSettings(samples=64, learning_rate=0.01, steps=500))
    draws = release(flow, 20_000, seed=1)
    constant = 0.5 * float(covariance.logdet()) + dimension / 2 * math.log(2 * math.pi)
    divergence = float((draws.log_density + gaussian(draws.values)).mean()) + constant
    assert -0.1 < divergence < 0.5
    torch.testing.assert_close(draws.values.mean(0), mean, atol=0.08, rtol=0)
    torch.testing.assert_close(draws.values.T.cov(), covariance, atol=0.1, rtol=0)
