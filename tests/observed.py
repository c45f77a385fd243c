"""Metrics as a run would write them."""

from megatron_rl.observe.metrics import MetricsFile


def metrics_record(version, seconds=1.0):
    record = {
        "version": version,
        "fingerprint": "f" * 64,
        "reward": {"mean": 0.1 * version, "all_equal_groups": 1},
        "loss": -0.1,
        "responses": {"truncated": 0.25},
        "time": {
            "iteration": 4 * seconds,
            "wait": 0.5 * seconds,
            "train": 2 * seconds,
            "other": 1.5 * seconds,
            "generated_tokens_per_second": 1000.0,
            "trained_tokens_per_second": 2000.0,
        },
    }
    evaluation = {"mean": 0.2, "pass": 0.1 * version, "num_prompts": 8, "num_samples": 1}
    return record | ({"evaluation": evaluation} if version % 2 == 0 else {})


def write_metrics(path, versions, seconds=1.0):
    with MetricsFile(path) as file:
        for version in versions:
            file.write(metrics_record(version, seconds))
