import runpy
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
NEEDS = tomllib.loads((ROOT / "megatron_rl" / "needs.toml").read_text(encoding="utf-8"))

setup(
    name="megatron-rl",
    version=runpy.run_path(str(ROOT / "megatron_rl" / "__init__.py"))["__version__"],
    description="GRPO on Megatron: periodically asynchronous, strictly on-policy",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.15",
    packages=find_packages(include=["megatron_rl", "megatron_rl.*"]),
    package_data={
        "megatron_rl": ["needs.toml"],
        "megatron_rl.command_line": ["megatron_flags.toml", "other_projects.toml"],
        "megatron_rl.launch": ["templates/*"],
        "megatron_rl.ops.shared_prompt": ["measured.json"],
        "megatron_rl.migrate": ["translations.toml"],
        "megatron_rl.analysis.report": ["parts/*"],
    },
    # Pages that messages and help name as docs/NAME.md.
    data_files=[("share/doc/megatron_rl", sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")))],
    # torch and megatron-core come with an extra, in the build for the device: none of them fits every machine.
    install_requires=NEEDS["always"],
    extras_require={
        **NEEDS["platforms"],
        **NEEDS["optional"],
        "dev": ["hypothesis", "mypy", "pytest", "pytest-timeout", "pytest-xdist", "ruff"],
    },
    entry_points={"console_scripts": ["megatron-rl = megatron_rl.cli:main"]},
)
