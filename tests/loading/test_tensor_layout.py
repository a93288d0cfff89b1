"""Where tensors stand in an Orbax tree."""

import numpy as np

from jaxis.loading.tensor_layout import ArraySpec, Place, layout_from_json, scanned_layout, unscanned_layout


def spec(*shape: int, dtype: str = "float32") -> ArraySpec:
    return ArraySpec(shape, np.dtype(dtype))


def test_unscanned_every_tensor_is_an_array_of_its_own_in_the_order_of_layers():
    layout = unscanned_layout({f"layers.{i}.w": spec(2, 3) for i in (10, 9, 0)})
    assert list(layout.places) == ["layers.0.w", "layers.9.w", "layers.10.w"]
    assert layout.arrays["layers", "10", "w"] == spec(2, 3)


def test_scanned_layers_alike_are_stacked():
    tensors = {f"model.layers.{i}.q.weight": spec(4, 3) for i in range(12)} | {"model.embed.weight": spec(5, 3)}
    layout = scanned_layout(tensors)
    assert layout.arrays == {
        ("model", "layers", "q", "weight"): spec(12, 4, 3),
        ("model", "embed", "weight"): spec(5, 3),
    }
    assert layout.places["model.layers.10.q.weight"] == Place(("model", "layers", "q", "weight"), (10,))


def test_scanned_layers_of_several_kinds_are_several_stacks_and_experts_an_axis():
    tensors = {}
    for i in range(6):
        tensors[f"layers.{i}.norm"] = spec(3)
        if i in (0, 3):
            tensors[f"layers.{i}.mlp.up"] = spec(4, 3)
        else:
            tensors |= {f"layers.{i}.mlp.experts.{e}.up": spec(2, 3) for e in range(11)}
    layout = scanned_layout(tensors)
    assert layout.arrays == {
        ("layers", "group_0", "norm"): spec(2, 3),
        ("layers", "group_0", "mlp", "up"): spec(2, 4, 3),
        ("layers", "group_1", "norm"): spec(4, 3),
        ("layers", "group_1", "mlp", "experts", "up"): spec(4, 11, 2, 3),
    }
    # Layers 1, 2, 4 and 5 are the second stack's 0 to 3.
    assert layout.places["layers.4.mlp.experts.10.up"].index == (2, 10)


def test_a_type_that_differs_is_not_stacked_with_the_others():
    tensors = {"l.0.w": spec(2), "l.1.w": spec(2, dtype="int8"), "l.2.w": spec(2)}
    assert set(scanned_layout(tensors).arrays) == {("l", "group_0", "w"), ("l", "group_1", "w")}


def test_numbers_that_are_no_list_are_names():
    tensors = {"l.1.w": spec(2), "l.3.w": spec(2)}
    assert set(scanned_layout(tensors).arrays) == {("l", "1", "w"), ("l", "3", "w")}


def test_every_element_of_every_array_is_one_tensors():
    tensors = {f"l.{i}.e.{j}.w": spec(2) for i in range(3) for j in range(4)} | {f"l.{i}.n": spec() for i in range(3)}
    layout = scanned_layout(tensors)
    assert len({(place.path, place.index) for place in layout.places.values()}) == len(tensors)
    covered = sum(int(np.prod(tensors[name].shape)) for name in layout.places)
    assert covered == sum(int(np.prod(array.shape)) for array in layout.arrays.values())


def test_json_round_trip():
    tensors = {f"l.{i}.w": spec(2, dtype="float8_e4m3fn") for i in range(3)}
    for layout in (unscanned_layout(tensors), scanned_layout(tensors)):
        assert layout_from_json(layout.to_json()) == layout
