"""Facts read from the text of compiled programs: sizes, traffic, copies and exchanges of programs written by hand."""

from __future__ import annotations

import pytest

from jaxis.compilation.hlo import arrays_of, parse_hlo
from jaxis.compilation.program_text import first_group, read_text

KIB = 1024


@pytest.mark.parametrize(
    ("text", "nbytes", "padded", "is_in_hbm"),
    [
        ("f32[3,5]{1,0}", 60, 60, True),
        ("bf16[5,100]{1,0:T(8,128)(2,1)}", 1000, 8 * 128 * 2, True),
        ("bf16[5,100]{0,1:T(8,128)(2,1)}", 1000, 104 * 128 * 2, True),  # the first axis is the minor one
        ("s32[300]{0:T(128)}", 1200, 384 * 4, True),
        ("bf16[64,128]{1,0:T(8,128)(2,1)S(1)}", 64 * 128 * 2, 64 * 128 * 2, False),
        ("s4[8,128]{1,0:T(8,128)(8,1)}", 512, 512, True),
        ("f8e4m3fn[2,4]{1,0}", 8, 8, True),
        ("pred[]", 1, 1, True),
    ],
)
def test_sizes_of_arrays(text, nbytes, padded, is_in_hbm):
    [array] = arrays_of(text)
    assert (array.nbytes, array.padded_bytes, array.is_in_hbm) == (nbytes, padded, is_in_hbm)


def program(*instructions: str, more: str = "") -> str:
    lines = "\n".join(f"  {each}" for each in instructions)
    return f"HloModule jit_f, is_scheduled=true\n\n{more}\nENTRY %main (a: f32[1]) -> f32[1] {{\n{lines}\n}}\n"


WEIGHT = "%w = f32[256,128]{1,0:T(8,128)} parameter(0)"  # 128 KiB
X = "%x = f32[8,128]{1,0:T(8,128)} parameter(1)"  # 4 KiB


def test_an_instruction_reads_its_operands_and_writes_its_result():
    text = program(WEIGHT, X, "ROOT %y = f32[8,256]{1,0:T(8,128)} convolution(%x, %w), dim_labels=bf_oi->bf")
    assert read_text(text).hbm_bytes == (128 + 4 + 8) * KIB


def test_what_stays_on_the_chip_is_not_counted():
    """The weight is fetched once, its result stays in VMEM."""
    text = program(
        WEIGHT,
        X,
        "%s = (f32[256,128]{1,0:T(8,128)S(1)}, f32[256,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%w)",
        "%d = f32[256,128]{1,0:T(8,128)S(1)} copy-done(%s)",
        "%y = f32[8,256]{1,0:T(8,128)S(1)} convolution(%x, %d), dim_labels=bf_oi->bf",
        "ROOT %z = f32[8,256]{1,0:T(8,128)S(1)} negate(%y)",
    )
    result = read_text(text)
    assert result.hbm_bytes == (128 + 4) * KIB
    assert result.copies == []


def test_a_fetch_that_the_previous_run_has_made_is_not_counted_twice():
    fetch = "(f32[256,128]{1,0:T(8,128)S(1)}, f32[256,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%w)"
    text = program(
        WEIGHT, f"%a = {fetch}, cross_program_prefetch_index=0", f"ROOT %b = {fetch}"
    )  # at the end, for the next run
    assert read_text(text).hbm_bytes == 128 * KIB


def test_a_fusion_that_slices_reads_the_slice_and_one_that_updates_writes_the_update():
    bodies = """
%sliced (p0: f32[256,128], p1: s32[]) -> f32[8,128] {
  %p0 = f32[256,128]{1,0:T(8,128)} parameter(0)
  %p1 = s32[] parameter(1)
  %c = s32[] constant(0)
  ROOT %ds = f32[8,128]{1,0:T(8,128)} dynamic-slice(%p0, %p1, %c), dynamic_slice_sizes={8,128}
}

%updated (q0: f32[256,128], q1: f32[8,128], q2: s32[]) -> f32[256,128] {
  %q0 = f32[256,128]{1,0:T(8,128)} parameter(0)
  %q1 = f32[8,128]{1,0:T(8,128)} parameter(1)
  %q2 = s32[] parameter(2)
  %k = s32[] constant(0)
  ROOT %dus = f32[256,128]{1,0:T(8,128)} dynamic-update-slice(%q0, %q1, %q2, %k)
}
"""
    index = "%i = s32[]{:S(2)} parameter(1)"
    slicing = "ROOT %s = f32[8,128]{1,0:T(8,128)} fusion(%w, %i), kind=kLoop, calls=%sliced"
    assert read_text(program(WEIGHT, index, slicing, more=bodies)).hbm_bytes == (4 + 4) * KIB
    update = "%u = f32[8,128]{1,0:T(8,128)} parameter(2)"
    updating = "ROOT %s = f32[256,128]{1,0:T(8,128)} fusion(%w, %u, %i), kind=kLoop, calls=%updated"
    assert read_text(program(WEIGHT, index, update, updating, more=bodies)).hbm_bytes == (2 * 4 + 4) * KIB


def test_copies_in_hbm_are_named_the_largest_first_and_loops_apart():
    body = """
%cond (s: (f32[8,128])) -> pred[] {
  %s = (f32[8,128]{1,0:T(8,128)}) parameter(0)
  ROOT %true = pred[] constant(true)
}

%body (t: (f32[8,128])) -> (f32[8,128]) {
  %t = (f32[8,128]{1,0:T(8,128)}) parameter(0)
  %e = f32[8,128]{1,0:T(8,128)} get-tuple-element(%t), index=0
  %n = f32[8,128]{0,1:T(8,128)} copy(%e)
  ROOT %r = (f32[8,128]{1,0:T(8,128)}) tuple(%e)
}
"""
    text = program(
        WEIGHT,
        "%turned = f32[256,128]{0,1:T(8,128)} copy(%w), metadata={op_name="
        '"jit(forward)/layer_0/transpose"'
        " stack_frame_id=3}",
        "%x = f32[8,128]{1,0:T(8,128)} parameter(1)",
        "%init = (f32[8,128]{1,0:T(8,128)}) tuple(%x)",
        "ROOT %loop = (f32[8,128]{1,0:T(8,128)}) while(%init), condition=%cond, body=%body",
        more=body,
    )
    result = read_text(text)
    assert [(copy.nbytes, copy.is_in_loop) for copy in result.copies] == [(128 * KIB, False), (64 * KIB, True)]
    assert result.copies[0].op_name == "jit(forward)/layer_0/transpose"
    assert (result.hbm_bytes, result.loop_hbm_bytes, result.num_loops) == (256 * KIB, (4 + 64) * KIB, 1)


def test_a_fusion_that_only_moves_is_a_copy_too():
    bodies = """
%joins (r0: f32[256,128], r1: f32[256,128]) -> f32[512,128] {
  %r0 = f32[256,128]{1,0:T(8,128)} parameter(0)
  %r1 = f32[256,128]{1,0:T(8,128)} parameter(1)
  ROOT %j = f32[512,128]{1,0:T(8,128)} concatenate(%r0, %r1), dimensions={0}
}

%moves (p0: f32[256,128]) -> f32[256,128] {
  %p0 = f32[256,128]{1,0:T(8,128)} parameter(0)
  ROOT %c = f32[256,128]{0,1:T(8,128)} copy(%p0)
}

%scales (q0: f32[256,128]) -> f32[256,128] {
  %q0 = f32[256,128]{1,0:T(8,128)} parameter(0)
  %turned = f32[256,128]{0,1:T(8,128)} copy(%q0)
  ROOT %n = f32[256,128]{0,1:T(8,128)} negate(%turned)
}
"""
    moved = "%m = f32[256,128]{0,1:T(8,128)} fusion(%w), kind=kLoop, calls=%moves"
    joined = "%o = f32[512,128]{1,0:T(8,128)} fusion(%w, %w), kind=kLoop, calls=%joins"
    scaled = "ROOT %s = f32[256,128]{0,1:T(8,128)} fusion(%w), kind=kLoop, calls=%scales"
    copies = read_text(program(WEIGHT, moved, joined, scaled, more=bodies)).copies
    assert [copy.nbytes for copy in copies] == [256 * KIB, 128 * KIB]


def test_exchanges_are_counted_once_with_the_bytes_of_their_result():
    text = program(
        X,
        "%r = f32[8,128]{1,0:T(8,128)} all-reduce(%x), channel_id=1, to_apply=%add",
        "%s = (f32[8,128]{1,0:T(8,128)}, f32[32,128]{1,0:T(8,128)}) all-gather-start(%r), channel_id=2",
        "ROOT %d = f32[32,128]{1,0:T(8,128)} all-gather-done(%s)",
    )
    exchanges = [(each.opcode, each.nbytes) for each in read_text(text).collectives]
    assert exchanges == [("all-reduce", 4 * KIB), ("all-gather", 16 * KIB)]


def test_exchanges_of_several_arrays_and_those_beside_products():
    begun = (
        "%gather (p: f32[8,128]) -> f32[32,128] {\n  ROOT %g = f32[32,128]{1,0} all-gather(%p), dimensions={0}\n}\n\n"
    )
    text = program(
        X,
        "%r = (f32[8,128]{1,0:T(8,128)}, f32[16,128]{1,0:T(8,128)}) all-reduce(%x, %x), to_apply=%add",
        "%async-collective-start.1 = f32[32,128]{1,0:T(8,128)} fusion(%x), kind=kCustom, calls=%gather",
        "%y = f32[8,128]{1,0:T(8,128)} fusion(%x), kind=kOutput, calls=%async_collective_fusion.1",
        "ROOT %async-collective-done.1 = f32[32,128]{1,0:T(8,128)} fusion(%y), kind=kCustom, calls=%gather",
        more=begun,
    )
    exchanges = [(each.opcode, each.nbytes, each.is_overlapped) for each in read_text(text).collectives]
    assert exchanges == [("all-reduce", 12 * KIB, False), ("all-gather", 16 * KIB, True)]


def test_a_kernel_counts_by_its_own_account():
    call = 'custom-call(%x), custom_call_target="tpu_custom_call"'
    name = 'metadata={op_name="jit(forward)/layer_0/attend/pallas_call" stack_frame_id=7}'
    estimate = (
        'backend_config={"custom_call_config":{"body":"TUzv","cost_estimate":{"flops":"9","bytes_accessed":"777"}}}'
    )
    text = program(
        X,
        f"%a = f32[8,128]{{1,0:T(8,128)}} {call}, {name}, {estimate}",
        f"ROOT %b = f32[8,128]{{1,0:T(8,128)}} {call}, {name}",
    )
    result = read_text(text)
    assert [(kernel.name, kernel.nbytes) for kernel in result.kernels] == [("attend", 777), ("attend", None)]
    assert result.hbm_bytes == 0


def test_operands_are_found_behind_comments_and_nested_types():
    text = program(WEIGHT, X, "ROOT %t = (f32[256,128]{1,0}, /*index=1*/f32[8,128]{1,0}) tuple(%w, /*index=1*/%x)")
    module = parse_hlo(text)
    assert module.computations[module.entry].instructions["t"].operands == ("w", "x")


@pytest.mark.parametrize(
    ("attributes", "group"),
    [
        ("channel_id=1, replica_groups={{0,2},{1,3}}, use_global_device_ids=true", (0, 2)),
        ("replica_groups=[2,4]<=[8], dimensions={0}", (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("replica_groups={}, to_apply=%add", ()),
        ("source_target_pairs={{0,1},{1,0}}", (0, 1)),
    ],
)
def test_the_first_group_of_an_exchange(attributes, group):
    assert first_group(attributes) == group
