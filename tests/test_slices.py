"""Named slices, and compiling for one: the parts that need the TPU compiler are skipped only where it is missing."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from overlapfx.aot import compile as compile_module
from overlapfx.aot import slices
from overlapfx.aot.assumptions import Assumptions
from overlapfx.aot.compile import Unreadable, compile_for
from overlapfx.aot.hlo import parse_module
from overlapfx.aot.lowering import lower
from overlapfx.aot.slices import FAMILIES, describe, make_slice_mesh, parse_slice
from overlapfx.aot.timeline import walk

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


class TestNames:
    @pytest.mark.parametrize(
        ("text", "chips", "devices", "slices_"),
        [
            ("v4:8x8x8", 512, 512, 1),
            ("v4:8x16x16", 2048, 2048, 1),
            ("v4:12x12x16", 2304, 2304, 1),
            ("v5e:16x16", 256, 256, 1),
            ("v6e:2x4", 8, 8, 1),
            ("tpu7x:2x2x1", 4, 8, 1),
            ("v5p:4x4x4,slices=2", 128, 128, 2),
        ],
    )
    def test_legal(self, text, chips, devices, slices_):
        read = parse_slice(text)
        assert (read.num_chips, read.num_devices, read.num_slices) == (chips, devices, slices_)
        assert str(read) == text
        assert read.torus.num_devices * read.num_slices == devices

    @pytest.mark.parametrize("text", ["v4", "v9:4x4", "v4:", "8x8x8", "v4:2x2x2;slices=2", ""])
    def test_unknown_lists_every_family(self, text):
        with pytest.raises(ValueError, match="unknown topology") as caught:
            parse_slice(text)
        assert all(f"{family}:" in str(caught.value) for family in FAMILIES)
        assert "v4:4x4x4,slices=2" in str(caught.value)

    @pytest.mark.parametrize(
        "text", ["v4:3x3x3", "v4:4x4", "v5e:3x5", "v5e:32x32", "v4:16x16x32", "v4:0x4x4", "v6e:4x4,slices=0"]
    )
    def test_no_such_slice_lists_its_family(self, text):
        family = text.split(":")[0]
        with pytest.raises(ValueError, match=f"no slice '{text}' exists") as caught:
            parse_slice(text)
        assert FAMILIES[family].named[0] in str(caught.value)

    def test_only_v5e_keeps_permutes_off_the_wrap_around(self):
        assert {name for name, family in FAMILIES.items() if not family.permute_wrap} == {"v5e"}


class TestEnvironment:
    def test_sets_what_is_missing_and_keeps_what_is_set(self, monkeypatch):
        monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
        monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5p-16")
        slices.prepare_environment()
        assert os.environ["TPU_SKIP_MDS_QUERY"] == "1"
        assert os.environ["TPU_ACCELERATOR_TYPE"] == "v5p-16"

    def test_missing_compiler_says_how_to_install_it(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ValueError, match=r"pip install 'overlapfx\[plan\]'"):
            describe(parse_slice("v4:2x2x1"))

    def test_platform_of_a_jax_imported_earlier(self, monkeypatch):
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        monkeypatch.setitem(sys.modules, "jax", None)  # must not be looked at while the variable is set
        slices.prepare_environment()


@needs_compiler
class TestDescriptions:
    @pytest.mark.parametrize(
        "text", ["v4:2x2x1", "v4:2x2x4", "v5e:1x1", "v5e:4x4", "v5p:4x4x4", "v6e:1x1", "tpu7x:2x2x1"]
    )
    def test_devices_are_the_places_of_the_torus(self, text):
        wanted = parse_slice(text)
        found = [slices.device_coord(device, wanted.torus) for device in describe(wanted)]
        assert sorted(found) == wanted.torus.coordinates()

    def test_slice_that_the_compiler_refuses(self):
        with pytest.raises(ValueError, match="libtpu does not know topology v4:3x1x1"):
            describe(slices.Slice(FAMILIES["v4"], (3, 1, 1)))

    def test_mesh_follows_the_placement(self):
        wanted = parse_slice("v4:2x2x4")
        mesh, placement = make_slice_mesh(wanted, {"y": 4, "x": 4})
        assert mesh.axis_names == ("y", "x")
        assert mesh.devices.shape == (4, 4)
        coords = tuple(slices.device_coord(device, wanted.torus) for device in mesh.devices.flat)
        assert coords == placement.order

    def test_several_slices_follow_the_first_axis(self):
        wanted = parse_slice("v5e:4x4,slices=2")
        mesh, placement = make_slice_mesh(wanted, {"replica": 4, "y": 2, "x": 4})
        assert placement.axes == {"replica": 2, "y": 2, "x": 4}
        numbers = [[device.slice_index for device in row.flat] for row in mesh.devices]
        assert [set(row) for row in numbers] == [{0}, {0}, {1}, {1}]
        with pytest.raises(ValueError, match="no multiple of that"):
            make_slice_mesh(wanted, {"replica": 1, "y": 8, "x": 4})

    @pytest.mark.parametrize(
        ("text", "axes", "remedy"),
        [
            ("v5e:4x4", {"y": 2, "x": 4}, "mesh y=2, x=4 has 8 devices but v5e:4x4 has 16; .*, such as y=4, x=4"),
            ("v5e:4x4,slices=2", {"y": 4, "x": 4}, "has 32; .*, such as replica=2, y=4, x=4"),
            ("tpu7x:2x2x1", {"y": 2, "x": 2}, "4 devices but tpu7x:2x2x1 has 8; .*, such as y=4, x=2"),
            ("v4:2x2x1", {"y": 1, "x": 3}, "3 devices but v4:2x2x1 has 4; choose axis sizes whose product is that"),
        ],
    )
    def test_mesh_that_does_not_fill_the_slices(self, text, axes, remedy):
        with pytest.raises(ValueError, match=remedy):
            make_slice_mesh(parse_slice(text), axes)


def matmul_after_gather(x_BD, w_DF):
    """Weights gathered over y by the ring's own name, then one einsum."""
    full_DF = jax.lax.all_gather(w_DF, "y", axis=1, tiled=True)
    return jnp.einsum("bd,df->bf", x_BD, full_DF)


def abstract(mesh, shape, spec):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))


@needs_compiler
class TestCompile:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("text", "axes"), [("v4:2x2x1", {"y": 2, "x": 2}), ("v4:2x2x1,slices=2", {"replica": 2, "y": 2, "x": 2})]
    )
    def test_real_compile_gives_text_memory_and_places(self, text, axes, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is kept from earlier
        wanted = parse_slice(text)
        mesh, placement = make_slice_mesh(wanted, axes)
        batch = P(tuple(name for name in axes if name != "x"), None)
        run = jax.shard_map(matmul_after_gather, mesh=mesh, in_specs=(batch, P(None, "y")), out_specs=batch)
        rows = 256 * math.prod(axes.values()) // axes["x"]
        args = (abstract(mesh, (rows, 1024), batch), abstract(mesh, (1024, 2048), P(None, "y")))
        options = {"xla_enable_async_all_gather": True}
        compiled = compile_for(wanted, run, args, options)
        again = compile_for(wanted, run, args, options)
        assert (compiled.is_kept, again.is_kept) == (False, True)
        assert (again.text, again.memory, again.compile_s) == (compiled.text, compiled.memory, compiled.compile_s)
        assert compiled.coords == placement.order
        assert compiled.options == {"xla_enable_async_all_gather": "true"}
        assert compiled.memory.arguments >= 2 * (256 * 1024 + 1024 * 1024)
        assert compiled.memory.total >= compiled.memory.arguments
        program = lower(parse_module(compiled.text))
        assert program.num_partitions == 4
        assert not program.unknown
        timeline = walk(program, wanted.torus, compiled.coords, Assumptions.for_chip(wanted.chip))
        # 2 * 256 * 1024 * 2048 FLOP at 275 TFLOP/s take 3.9 us; half of 4 MiB over the one link of a pair 46.6 us.
        assert timeline.compute_s > 3.9e-6
        assert timeline.communication_s == pytest.approx(1024 * 1024 * 2 / 45e9 + 1e-6, rel=0.2)

    def test_refused_option(self):
        wanted = parse_slice("v4:2x2x1")
        mesh, _ = make_slice_mesh(wanted, {"y": 2, "x": 2})
        with pytest.raises(ValueError, match="refuses an option"):
            compile_for(wanted, lambda x: x + 1, [abstract(mesh, (8, 128), P("y"))], {"xla_no_such_flag": True})

    def test_temporaries_are_those_that_live_at_once(self):
        stats = types.SimpleNamespace(
            argument_size_in_bytes=200,
            output_size_in_bytes=150,
            alias_size_in_bytes=140,
            temp_size_in_bytes=1500,  # what is set apart, some of it never at once
            generated_code_size_in_bytes=3,
            peak_memory_in_bytes=1000,
        )
        found = compile_module._memory(stats)
        assert found.temporaries == 1000 - 200 - 10
        assert found.total == 1003

    def test_versions_that_do_not_go_together(self):
        wanted = parse_slice("v4:2x2x1")
        mesh, _ = make_slice_mesh(wanted, {"y": 2, "x": 2})

        class Compiled:
            jaxpr = jax.make_jaxpr(lambda: 0)()

            def __call__(self, x):
                return x

            def trace(self, *_):
                return self

            def lower(self):
                return self

            def as_text(self, **_):
                return "module"

            def compile(self, **_):
                raise jax.errors.JaxRuntimeError(
                    "INTERNAL: RET_CHECK failure (xla/hlo/ir/hlo_instruction.cc:390) arity"
                )

        with pytest.raises(Unreadable, match=r"jaxlib \S+ cannot read what libtpu \S+ compiled for v4:2x2x1 .*arity"):
            compile_for(wanted, Compiled(), [abstract(mesh, (8, 128), P("y"))])

    def test_arguments_need_one_mesh_of_the_slice(self):
        wanted = parse_slice("v4:2x2x2")
        with pytest.raises(ValueError, match="0 meshes were found"):
            compile_for(wanted, lambda x: x, [jax.ShapeDtypeStruct((8,), jnp.float32)])
        mesh, _ = make_slice_mesh(parse_slice("v4:2x2x1"), {"y": 2, "x": 2})
        with pytest.raises(ValueError, match="sharded over 4 devices but v4:2x2x2 has 8"):
            compile_for(wanted, lambda x: x, [abstract(mesh, (8, 128), P("y"))])
