"""The tables of the learning benchmarks compare runs of several seeds."""

from tests.benchmarks import lags, noisy_raters


def make_lag_run(seed: int, before: float, after: float) -> lags.Result:
    return lags.Result(
        name="PPO",
        label="",
        seed=seed,
        lag=8,
        updates=4,
        approvals=[0.3, 0.5, before, after, 0.9],
        fall=[2, 3, before, after, 400],
        refused=0,
        curves={},
    )


def make_noise_run(seed: int, noise: noisy_raters.Noise, approval: float) -> noisy_raters.Result:
    return noisy_raters.Result("PPO", "", noise, seed, 100, 12, [approval, approval], [24], [0.0], [])


def test_summary_counts_the_seeds_with_a_fall_above_the_bound() -> None:
    summary = lags.summary([make_lag_run(1, 0.8, 0.78), make_lag_run(2, 0.8, 0.69), make_lag_run(3, 0.8, 0.5)])
    [row] = summary.splitlines()[2:]
    assert row.split(" | ")[2] == "1, 2, 3"
    assert row.split(" | ")[-3:] == ["+30 ± 3", "2", "1 |"]


def test_the_loss_compares_runs_of_the_same_seed() -> None:
    runs = [make_noise_run(1, "none", 0.9), make_noise_run(2, "none", 0.8), make_noise_run(2, "coin-raters", 0.76)]
    clean, noisy = noisy_raters.table(runs).splitlines()[2:]
    assert clean.split(" | ")[-2] == "–"
    assert noisy.split(" | ")[-2] == "4"
