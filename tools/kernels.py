"""Compile every GPU kernel for GPUs that may be absent, and print the resources of each.

Run: python -m tools kernels [--triton 3.6.0] [--front] [--few] [--only REGEX] [sm_80 sm_90 …]

Triton's wheel holds ptxas and cuobjdump, so this runs anywhere. Prints a line per kernel and
variant: registers per thread, bytes spilled to local memory, bytes of shared memory, warps. The
line also counts two things in the PTX: products on tensor cores, and copies to shared memory that
may be in flight during a wait. It measures no speed. Exits with 1 when a kernel does not compile,
spills more than two registers, or, for many rows, has no product on tensor cores.

--front translates one variant of each kernel and format to Triton's first language, in seconds:
most errors show there. --few compiles the same variants to machine code, each for one of the GPUs.
--triton uses another release, which pip installs below build/ once.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from moeinf.offload.gpu_kernels import decode_attention as attention
from moeinf.offload.gpu_kernels import elementwise as between
from moeinf.offload.gpu_kernels import expert_kernels as kernels
from moeinf.offload.gpu_kernels import grouped_gemm as gemm
from moeinf.offload.gpu_kernels import prefill_attention as prefill
from moeinf.offload.gpu_kernels import router
from moeinf.offload.gpu_kernels.tiles import FUSION

ROOT = Path(__file__).parents[1]
DEFAULT = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")  # Ampere, Ada, Hopper, Blackwell
LOWEST = "3.6.0"  # pyproject's; torch 2.11 needs exactly this release
SPILLED_BYTES = 8  # three blocks of 32 rows spill that on sm_120
FORMS = ("q4", "q8", "q3", "q2", "mxfp4", "q4k", "q5k", "q6k", "nvfp4", "bf16")
POINTERS = {
    "ids": "*i64", "table": "*i32", "words": "*i32", "plain": "*bf16",
    "x_words": "*i32", "x_starts": "*i32", "x_scales": "*fp32", "codes": "*i8", "starts": "*i32",
    "scales": "*fp32", "sizes": "*fp32", "out": "*bf16", "x": "*bf16", "rows": "*bf16",
    "weights": "*fp32", "bytes_of": "*u8", "x_codes": "*i8", "begins": "*i64", "slots": "*i32",
    "order": "*i64", "q": "*bf16", "k": "*bf16", "v": "*bf16", "positions": "*i64",
    "sums": "*fp32", "tops": "*fp32", "sinks": "*bf16", "scale": "fp32",
    "weight": "*bf16", "q_weight": "*bf16", "k_weight": "*bf16", "cos": "*fp32", "sin": "*fp32",
    "keys": "*bf16", "values": "*bf16", "latent": "*bf16", "memory": "*bf16", "gate": "*bf16",
    "up": "*bf16", "bias": "*bf16", "logits": "*fp32", "eps": "fp32", "q_eps": "fp32",
    "k_eps": "fp32", "clip": "fp32", "jitter": "fp32",
}  # fmt: skip
PLAIN = [name for name, pointer in POINTERS.items() if pointer == "*bf16"]  # of a model in float32
# Sizes that are multiples of 16 in all models; Triton then assumes it.
ROUND = (
    "slot_words",
    "hidden",
    "inner",
    "columns",
    "width",
    "outputs",
    "matrix_words",
    "down_words",
    "value_width",
    "k_head",
    "k_token",
    "v_head",
    "v_token",
    "m_token",
    "angles",
    "nope",
    "rope",
    "kv_lora",
)

Variant = tuple[str, Any, dict[str, Any], int]  # name, kernel, constants, warps

ACTIVATIONS = (("swiglu", False), ("clamped_swiglu", True), ("geglu", False), ("relu", True))
ACTIVATIONS += (("relu2", False), ("swiglu10", False))


MANY = (gemm.grouped_inner, gemm.grouped_down, gemm.linear_many)  # of many rows


def variants() -> Iterator[Variant]:
    """Yield the name, the kernel, its constants and its number of warps."""
    for form in FORMS:
        common = {"FORM": form, "STAGES": 4, "EMULATE": False}
        for activation, biased in ACTIVATIONS:
            constants = {**common, "DOWN": form, "ACTIVATION": activation, "BIASED": biased}
            yield f"expert_inner {form} {activation}", kernels.expert_inner, constants, 4
            if form == "q4":
                constants = {**constants, "DOWN": "q8"}
                yield f"expert_inner q4d8 {activation}", kernels.expert_inner, constants, 4
        yield f"expert_down {form}", kernels.expert_down, {**common, "BIASED": True}, 4
        for rows in (1, 2, 4, 8, 16):
            constants = {**common, "ROWS": rows, "LANES": 32}
            yield f"linear_rows {form} {rows}", kernels.linear_rows, constants, 4 if rows < 8 else 8
        if form != "bf16":
            yield from on_tensor_cores(form)
            constants = {"FORM": form, "GROUPS": 8}
            yield f"quantise_rows {form}", kernels.quantise_rows, constants, 1
        if form not in ("mxfp4", "bf16"):
            constants = {"FORM": form, "COLUMNS": 512}
            yield f"gather_rows {form}", kernels.gather_rows, constants, 4
    yield "combine_rows", kernels.combine_rows, {"COLUMNS": 512}, 4
    for values, block in ((128, 64), (512, 32)):
        common = {"BLOCK": block, "VALUES": values, "SPLITS": attention.SPLITS}
        constants = {**common, "PIECE": 64, "HEADS": 16, "EMULATE": False}
        yield f"attend_part {values}", attention.attend_part, constants, 4
        yield f"attend_part fp32 {values}", attention.attend_part, constants | {"TYPE": "*fp32"}, 8
        constants = {**common, "COLUMNS": 64, "SUNK": True}
        yield f"attend_join {values}", attention.attend_join, constants, 4
    yield from of_many_rows()
    yield from between_products()


def of_many_rows() -> Iterator[Variant]:
    """Yield the same for a prefill chunk's attention: with sinks, or with own keys for every head.

    The latter makes per_group 1, which Triton treats as a constant.
    """
    for dtype, width, values in (
        (torch.bfloat16, 64, 64), (torch.bfloat16, 128, 128), (torch.bfloat16, 192, 128),
        (torch.bfloat16, 256, 256), (torch.bfloat16, 512, 512), (torch.float32, 128, 128),
        (torch.float32, 192, 128), (torch.float32, 256, 256), (torch.float32, 512, 512),
    ):  # fmt: skip
        constants, how = prefill.sizes_of(dtype, width, values)
        constants |= {"SUNK": True, "EMULATE": False, "STAGED": how["num_stages"]}
        if dtype == torch.float32:
            constants["TYPE"] = "*fp32"
        name = f"attend_lines{' fp32' * (dtype == torch.float32)} {width} {values}"
        yield name, prefill.attend_lines, constants, how["num_warps"]
        alone = {**constants, "SUNK": False, "per_group": 1}
        yield f"{name} alone", prefill.attend_lines, alone, how["num_warps"]


def between_products() -> Iterator[Variant]:
    """Yield the same for the kernels between the products of a decode step."""
    for name, more in (("", {}), (" fp32", {"TYPE": "*fp32"})):
        for wide in (False, True):
            constants = {"PIECE": 2048, "WIDE": wide, **more}
            yield f"norm_rows{name}{' wide' * wide}", between.norm_rows, constants, 8
            constants = {"COLUMNS": 256, "NORMED": True, "WIDE": wide, "CLIPPED": True, **more}
            yield f"gqa_row{name}{' wide' * wide}", between.gqa_row, constants, 1
        constants = {"COLUMNS": 128, "NORMED": False, "WIDE": False, "CLIPPED": False, **more}
        constants["groups"] = 1  # Triton treats it as a constant, like every 1 of a launch
        yield f"gqa_row{name} plain", between.gqa_row, constants, 1
        yield f"mla_row{name}", between.mla_row, {"COLUMNS": 64, "LATENT": 512, **more}, 2
        yield f"gated_rows{name}", between.gated_rows, {"COLUMNS": 1024, **more}, 4
        constants = {"PIECE": 2048, "BIASED": True, **more}
        yield f"router_logits{name}", router.router_logits, constants, 4
    for score, groups, width, top_k in (
        ("softmax", 1, 64, 8), ("softmax", 8, 32, 6), ("softmax", 1, 512, 10),
        ("top_softmax", 1, 128, 4), ("sigmoid", 8, 32, 8), ("sigmoid", 1, 512, 16),
        ("mixer", 1, 16, 2),
    ):  # fmt: skip
        constants = {
            "SCORE": score, "GROUPS": groups, "WIDTH": width, "K": top_k,
            "CHOSEN": triton.next_power_of_2(top_k), "RENORMALISE": True,
        }  # fmt: skip
        if groups == 1:
            constants |= {"groups": 1, "kept": 1}
        yield f"choose_experts {score} {groups} {width}", router.choose_experts, constants, 1


def on_tensor_cores(form: str) -> Iterator[Variant]:
    """Yield the same for kernels of many rows."""
    for rows, warps in ((16, 4), (32, 4), (64, 8))[: 2 if form == "q6k" else 3]:
        common = {"FORM": form, "STAGES": 4, "ROWS": rows}
        for activation, biased in ACTIVATIONS:
            constants = {**common, "DOWN": form, "ACTIVATION": activation, "BIASED": biased}
            yield f"grouped_inner {form} {activation} {rows}", gemm.grouped_inner, constants, warps
        constants = {**common, "LANES": 128}
        yield f"linear_many {form} {rows}", gemm.linear_many, constants, warps
        constants = {**constants, "BIASED": True}
        yield f"grouped_down {form} {rows}", gemm.grouped_down, constants, warps


def launch(kernel: Any, constants: dict[str, Any], warps: int) -> tuple[ASTSource, dict[str, Any]]:
    """Return a kernel's source and options, typed and aligned as expert_ffn.py passes them."""
    constants = dict(constants)
    form, plain = constants.get("FORM"), constants.pop("TYPE", None)
    staged = constants.pop("STAGED", None)
    types = dict(POINTERS)
    if plain is not None:
        types |= dict.fromkeys(PLAIN, plain)
    if form == "bf16":
        types["x_words"] = types["codes"] = "*bf16"
        if kernel is kernels.linear_rows:
            types["words"] = "*bf16"
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    round_16 = [
        i for i, n in enumerate(names)
        if n not in constants and (n in ROUND or signature[n].startswith("*"))
    ]  # fmt: skip
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in round_16},
    )
    options = {"num_warps": warps, **FUSION}
    if staged is not None:
        options["num_stages"] = staged
    return source, options


def compiled(kernel: Any, constants: dict[str, Any], warps: int, arch: int) -> Any:
    """Return the kernel for one GPU."""
    source, options = launch(kernel, constants, warps)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def through_front(kernel: Any, constants: dict[str, Any], warps: int, arch: int) -> None:
    """Translate a kernel to Triton's first language; raise its CompilationError."""
    source, options = launch(kernel, constants, warps)
    target, context = GPUTarget("cuda", arch, 32), ir.context()
    backend = make_backend(target)
    options = backend.parse_options(options)
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    source.make_ir(target, options, functions, modules, context)


def usage(cubin: bytes) -> tuple[int, int]:
    """Return registers per thread, and bytes of stack, which holds spilled registers."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def products(ptx: str) -> int:
    """Return the number of instructions that multiply 8-bit integers on tensor cores."""
    found = r"^\s*(?:wgmma\.mma_async|mma)\.sync\.aligned\.m\d+n\d+k32\S*\.s32\.s8\.s8"
    return len(re.findall(found, ptx, re.M))


def groups_ahead(ptx: str) -> int:
    """Return the groups of copies that may stay in flight during a wait for older ones."""
    return max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)), default=0)


def of_each_format(chosen: list[Variant]) -> list[Variant]:
    """Return the first variant of each kernel and format."""
    first: dict[tuple[object, ...], Variant] = {}
    for variant in chosen:
        _, kernel, constants, _ = variant
        first.setdefault((kernel, constants.get("FORM"), constants.get("TYPE")), variant)
    return list(first.values())


def of_architecture(chosen: list[Variant], arch: int, among: list[int]) -> Iterator[Variant]:
    """Yield the variants that are compiled for `arch`: each for one of the architectures.

    Programs of 64 rows are never launched on sm_100 (expert_ffn.py).
    """
    for place, variant in enumerate(chosen):
        large = variant[1] in MANY and variant[2]["ROWS"] > 32
        fits = [one for one in among if one != 100 or not large]
        if fits and fits[place % len(fits)] == arch:
            yield variant


def installed(release: str) -> Path:
    """Return the folder of another Triton, which pip installs on the first call."""
    folder = ROOT / "build" / f"triton-{release}"
    if not (folder / "triton").exists():
        pip = ("-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", str(folder))
        subprocess.run([sys.executable, *pip, f"triton=={release}"], check=True)
    return folder


def checked(name: str, made: Any, warps: int, arch: int, many: bool) -> bool:
    """Print a compiled kernel's resources; return whether they are as they must be."""
    registers, stack = usage(made.asm["cubin"])
    multiplied, ahead = products(made.asm["ptx"]), groups_ahead(made.asm["ptx"])
    print(
        f"sm_{arch} {name:36} {registers:4} registers {stack:6} spilled "
        f"{made.metadata.shared:7} shared {warps:3} warps {multiplied:4} mma "
        f"{ahead:3} ahead",
        flush=True,
    )
    return stack <= SPILLED_BYTES and not (many and multiplied == 0)


def main() -> int:
    """Compile what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument(
        "--front", action="store_true", help="one of each kernel and format, without machine code"
    )
    parser.add_argument("--few", action="store_true", help="one of each, each for one GPU")
    parser.add_argument("--triton", default=triton.__version__, help=f"{LOWEST} is the lowest")
    parser.add_argument("architectures", nargs="*", default=DEFAULT)
    options = parser.parse_args()
    if options.triton != triton.__version__:
        path = os.pathsep.join([str(installed(options.triton)), *sys.path])
        command = [sys.executable, "-m", "tools", "kernels", *sys.argv[1:]]
        return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, cwd=ROOT).returncode
    chosen = [v for v in variants() if re.search(options.only, v[0])]
    if options.front or options.few:
        chosen = of_each_format(chosen)
    failed, count = 0, 0
    architectures = [int(name.removeprefix("sm_")) for name in options.architectures]
    for arch in architectures:
        for name, kernel, constants, warps in of_architecture(
            chosen, arch, architectures if options.few else [arch]
        ):
            count += 1
            many = kernel in MANY
            try:
                if options.front:
                    through_front(kernel, constants, warps, arch)
                    continue
                made = compiled(kernel, constants, warps, arch)
            except Exception as error:  # a compiler may raise anything
                failed += 1
                print(f"sm_{arch} {name:36} {str(error).strip().splitlines()[-1]}", flush=True)
                continue
            failed += not checked(name, made, warps, arch, many)
    print(f"Triton {triton.__version__}: {count} compiled, {failed} wrong")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
