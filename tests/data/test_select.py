"""Which classes and images a data set takes, and into which part each goes."""

import os
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.data.selection import Item, by_class, choose_labels, split_class

NAMES = st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=60, unique_by=str.casefold)


def items(names, part=""):
    return [Item("label", name, part) for name in names]


def views(objects, angles):
    return [
        Item("label", f"obj{o}__{angle}.png", group=f"obj{o}", angle=angle)
        for o in range(objects)
        for angle in range(0, 360, 360 // angles)
    ]


def cut(images, how="random", validation=0.2, test=0.0, seed=0, name="class", most=None):
    """The names by part."""
    parts = split_class(
        name, images, method=how, validation=validation, test=test, seed=seed, limits=most
    )
    return {part: [item.name for item in members] for part, members in parts.items()}


# Parts


@given(NAMES, st.floats(0, 1), st.integers(0, 2**32), st.randoms(use_true_random=False))
def test_a_split_keeps_every_image_once_and_leaves_no_part_empty(names, share, seed, order):
    parts = cut(items(names), validation=share, seed=seed)
    assert sorted(parts["train"] + parts["validation"]) == sorted(names)
    assert len(parts["validation"]) == min(max(round(share * len(names)), 1), len(names) - 1)
    assert parts["test"] == []
    shuffled = list(names)
    order.shuffle(shuffled)
    assert cut(items(shuffled), validation=share, seed=seed) == parts


def test_a_split_draws_differently_for_another_seed_or_class():
    names = [f"{i:03}.png" for i in range(100)]
    draws = {
        tuple(cut(items(names), seed=seed, name=name)["validation"])
        for seed in range(3)
        for name in "ab"
    }
    assert len(draws) == 6
    # Every image has its turn: the draw does not favour a part of the names.
    turns = Counter(
        name for seed in range(200) for name in cut(items(names), seed=seed)["validation"]
    )
    assert len(turns) == 100 and min(turns.values()) > 15 and max(turns.values()) < 70


@given(NAMES, st.integers(0, 20), st.integers(0, 9), st.integers(0, 9), st.integers(0, 99))
def test_a_sources_parts_stay_and_limits_hold(names, given_validation, train_most, val_most, seed):
    given = [f"given for validation {i}" for i in range(given_validation)]
    images = items(names, "train") + items(given, "validation") + items(["t"], "test")
    parts = cut(images, seed=seed, most={"train": train_most, "validation": val_most})
    assert set(parts["validation"]) <= (set(given) or set(names))
    assert set(parts["train"]) <= set(names) - set(parts["validation"])
    assert parts["test"] == ["t"]
    if given:
        assert len(parts["train"]) == min(len(names), train_most or len(names))
        assert len(parts["validation"]) == min(len(given), val_most or len(given))


@given(st.integers(1, 6), st.sampled_from([4, 12, 36]), st.floats(0.05, 0.9), st.integers(0, 99))
def test_by_angle_holds_out_one_arc_of_every_object(objects, angles, share, seed):
    parts = cut(views(objects, angles), "by-angle", validation=share, seed=seed)
    assert len(parts["train"]) + len(parts["validation"]) == objects * angles
    for o in range(objects):
        held = {
            int(n.split("__")[1][:-4]) // (360 // angles)
            for n in parts["validation"]
            if n.startswith(f"obj{o}__")
        }
        assert len(held) == min(max(round(share * angles), 1), angles - 1)
        begins = [k for k in held if (k - 1) % angles not in held]
        assert len(begins) == 1, "an arc begins once"


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(0, 3))
def test_by_content_keeps_copies_together_and_never_holds_out_what_is_in_no_group(contents, seed):
    group_of = {f"{number}.png": str(content or "") for number, content in enumerate(contents)}
    images = [Item("label", name, group=group) for name, group in group_of.items()]
    groups = set(group_of.values()) - {""}
    if not groups or len(set(contents)) < 2:
        with pytest.raises(
            Failure, match="image that differs from others: a split needs at least two"
        ):
            cut(images, "by-content", seed=seed)
        return
    parts = cut(images, "by-content", validation=0.3, seed=seed)
    assert sorted(parts["train"] + parts["validation"]) == sorted(group_of)
    train, held_out = ({group_of[name] for name in parts[part]} for part in ("train", "validation"))
    assert held_out and train and not train & held_out and "" not in held_out


@pytest.mark.parametrize(
    ("images", "how", "words"),
    [
        ([], "random", "class 'class' has 0 image: a split needs at least two"),
        (items(["only.png"]), "random", "class 'class' has 1 image: a split needs at least two"),
        (views(1, 4), "by-object", "class 'class' has 1 object: a split needs at least two"),
        (views(1, 1), "by-angle", "1 view of 'obj0': a split needs at least two"),
        (items(["A.png", "a.png"]), "random", "one where case does not count: 'a.png'"),
        (items(["a.png", "a.png"]), "random", "one where case does not count: 'a.png'"),
        (items(["a"], "validation"), "random", "has no training images"),
    ],
)
def test_what_cannot_be_split_is_refused(images, how, words):
    with pytest.raises(Failure, match=words):
        cut(images, how)


# Classes


def test_classes_are_chosen_by_name():
    labels, titles = (
        {"n1", "n2", "n3"},
        {"n1": "crane", "n2": "Crane, bird", "n3": "dog", "n4": "fox"},
    )
    assert choose_labels(labels, titles, {"classes": "Bird, dog,n3"}) == {"n2", "n3"}
    assert choose_labels(labels, titles, {}) == labels
    with pytest.raises(UsageError, match="'crane' may be n1 or n2: name the one you mean"):
        choose_labels(labels, titles, {"classes": "crane"})
    with pytest.raises(UsageError, match="unknown class 'fox': choose from n1, n2, n3"):
        choose_labels(labels, titles, {"classes": "fox"})


@given(
    st.sets(st.text(min_size=1), min_size=2),
    st.data(),
    st.integers(0, 99),
    st.randoms(use_true_random=False),
)
def test_so_many_classes_are_drawn_by_the_seed_alone(labels, data, seed, order):
    number = data.draw(st.integers(2, len(labels)))
    shuffled = sorted(labels)
    order.shuffle(shuffled)
    options = {"num_classes": number, "seed": seed}
    chosen = choose_labels(set(shuffled), {}, options)
    assert len(chosen) == number and chosen <= labels
    assert chosen == choose_labels(labels, {}, options)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("..", "'..' cannot be a class, .*: it is empty or begins with a dot. Rename it"),
        ("a/b", "cannot be a class, .*: it has a slash, a backslash or a control character"),
        ("a\n", "'a.n' cannot be a class, .*: it has a slash, a backslash or a control character"),
        ("x" * 201, "cannot be a class, .*: it has more than 200 bytes"),
        (
            os.fsdecode(b"caf\xe9"),
            "class 'café' is not UTF-8 but Latin-1, say: .* `convmv -f latin1 -t utf8 -r --notest",
        ),
    ],
)
def test_what_cannot_name_a_folder_is_no_class(name, why):
    with pytest.raises(UsageError, match=why):
        by_class([Item(name, "1.png")], None)
