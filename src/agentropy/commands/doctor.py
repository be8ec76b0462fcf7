"""`agentropy doctor`: what this machine offers, proven where it can be, and what to install."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packaging.requirements import Requirement

OK, NOTE, BAD = "ok  ", "--  ", "BAD "
PACKAGE = "agentropy"


def register(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add `doctor`."""
    p = subparsers.add_parser(
        "doctor", help="check this machine: isolation, device, packages, caches; exit code 1 if unfit"
    )
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one line a finding. Returns 1 when something that every run needs is missing."""
    bad = 0
    for title, check in (
        ("system", system),
        ("packages", packages),
        ("device", device),
        ("sandbox", sandbox),
        ("caches", caches),
    ):
        print(title)
        for mark, text in check():
            bad += mark == BAD
            print(f"  {mark} {text}", flush=True)
    print(f"{bad} problem{'s' if bad != 1 else ''} to solve" if bad else "this machine is fit")
    return 1 if bad else 0


def system() -> list[tuple[str, str]]:
    """Python, kernel, cores, memory, free disk."""
    python = platform.python_version()
    old = sys.version_info < (3, 11)
    found = [(BAD if old else OK, f"Python {python} at {sys.executable}" + ("; install 3.11 or later" if old else ""))]
    found.append((OK, f"{platform.system()} {platform.release()} on {platform.machine()}, {os.cpu_count()} cores"))
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    found.append((OK if free > 1 else BAD, f"{free:.1f} GB free here" + ("" if free > 1 else "; a run needs 1 GB")))
    return found


def packages() -> list[tuple[str, str]]:
    """Versions of the required packages, and which extras are there."""
    try:
        requirements = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return [(BAD, f"{PACKAGE} is not installed: pip install -e . in its checkout")]
    from packaging.requirements import Requirement

    found: list[tuple[str, str]] = []
    extras: dict[str, list[Requirement]] = {}
    for text in requirements:
        requirement = Requirement(text)
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", text)
        if requirement.name == PACKAGE or (extra and extra.group(1) == "dev"):
            continue
        if extra:
            extras.setdefault(extra.group(1), []).append(requirement)
        elif requirement.marker is None or requirement.marker.evaluate():
            found.append(_required(requirement))
    for name, wanted in extras.items():
        missing = [r.name for r in wanted if _version(r.name) is None]
        if missing:
            found.append((NOTE, f"extra {name}: no {', '.join(missing)}; pip install '{PACKAGE}[{name}]'"))
        else:
            found.append((OK, f"extra {name}: {', '.join(f'{r.name} {_version(r.name)}' for r in wanted)}"))
    return found


def _required(requirement: Requirement) -> tuple[str, str]:
    name, version = requirement.name, _version(requirement.name)
    cure = f"pip install '{name}{requirement.specifier}'"
    if version is None:
        return BAD, f"{name} is missing: {cure}"
    if not requirement.specifier.contains(version, prereleases=True):
        return BAD, f"{name} {version} is not what is needed: {cure}"
    return OK, f"{name} {version}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def device() -> list[tuple[str, str]]:
    """What torch can compute on."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return [(BAD, f"torch can't be imported: {error}")]
    found = [(OK, f"cpu, {torch.get_num_threads()} threads")]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            memory = torch.cuda.get_device_properties(i).total_memory / 2**30
            found.append((OK, f"cuda:{i} {torch.cuda.get_device_name(i)}, {memory:.0f} GiB"))
    elif torch.backends.mps.is_available():
        found.append((OK, "mps"))
    else:
        found.append((NOTE, f"no GPU that torch {torch.__version__} can use; the built-in worlds train on the CPU"))
    return found


def sandbox() -> list[tuple[str, str]]:
    """Start the sandbox, which tests itself, and run a program of each kind."""
    from agentropy.errors import UserError
    from agentropy.sandbox import Capabilities, ExecutionResult, LocalSandbox

    async def probe() -> tuple[Capabilities, list[ExecutionResult]]:
        async with LocalSandbox(workers=1) as pool:
            results = await pool.execute(
                ["print(6 * 7)", "import numpy, sympy\nprint(sympy.Integer(6) * 7)"], timeout=30
            )
            async with pool.session() as session:
                await session.run("x = 42")
                results.append(await session.run("x"))
            return pool.capabilities(), results

    try:
        about, results = asyncio.run(probe())
    except UserError as error:
        return [(BAD, str(error))]
    found = [(OK, f"isolation: {about.level} ({_walls(about)})")]
    found.append((OK, f"proven denied: {', '.join(about.proven)}"))
    found += [(NOTE, f"not in force: {text}") for text in about.missing]
    for what, result in zip(("a program", "numpy and sympy", "a session"), results, strict=True):
        works = result.stdout == "42\n"
        found.append(
            (OK if works else BAD, f"{what}: {result.duration * 1000:.1f} ms" if works else f"{what}: {result}")
        )
    return found


def _walls(about: Any) -> str:
    walls = [f"Landlock ABI {about.landlock_abi}" if about.landlock_abi else "", "seccomp" if about.seccomp else ""]
    walls += ["namespaces" if about.namespaces else "", "a user id for each call" if about.own_user else ""]
    return ", ".join(wall for wall in walls if wall)


def caches() -> list[tuple[str, str]]:
    """Where models and data sets are kept, and whether one can write there."""
    home = Path(
        os.environ.get("HF_HOME", Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "huggingface")
    )
    own = Path(os.environ.get("AGENTROPY_CACHE", "~/.cache/agentropy"))
    found = [
        _directory("Hugging Face cache (HF_HOME)", home.expanduser()),
        _directory("warm starts, web pages (AGENTROPY_CACHE)", own.expanduser()),
    ]
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        found.append((NOTE, "HF_HUB_OFFLINE is set: models are taken from the cache only"))
    return found


def _directory(what: str, path: Path) -> tuple[str, str]:
    parent = path
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK):
        return NOTE, f"{what}: {path} can't be written to"
    return OK, f"{what}: {path}{'' if path.exists() else ' (not there yet)'}"
