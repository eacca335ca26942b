"""The table that says which image how many tasks need."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerstore.errors import LimitError, MalformedError, NotFoundError
from layerstore.sync.usage import Usage, parse_usage, read_usage


def test_a_table_with_all_columns() -> None:
    text = 'Image, tasks ,note,eligible\r\nteam/a:1,12,"two\nlines",yes\r\n\r\nb,0.5,,NO\r\nc,0,"x, y",\r\n'
    assert parse_usage(b"\xef\xbb\xbf" + text.encode(), "t.csv") == (
        Usage("team/a:1", 12, True, 3),
        Usage("b", 0.5, False, 5),
        Usage("c", 0, True, 6),
    )


def test_without_the_column_all_may_leave() -> None:
    assert parse_usage(b"tasks,image\n3,a\n", "t.csv") == (Usage("a", 3, True, 2),)
    assert parse_usage(b"image,tasks\n", "t.csv") == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "t.csv is empty"),
        ("\n \n", "t.csv is empty"),
        ("a,1\n", "line 1: no column is named 'image'"),
        ("image,count\na,1\n", "line 1: no column is named 'tasks'"),
        ("image,tasks,Image\n", "line 1: two columns are named 'image'"),
        ("image,tasks\na\n", "line 2: 1 columns, where the headings have 2"),
        ("image,tasks\na,1\nb,1,2\n", "line 3: 3 columns, where the headings have 2"),
        ("image,tasks\na,1\n\na,2\n", "line 4: image 'a' is on line 2 already"),
        ("image,tasks\na,-1\n", "line 2: tasks are a number such as 12 or 0.5, not '-1'"),
        ("image,tasks\na,nan\n", "line 2: tasks are a number"),
        ("image,tasks\na,1e9\n", "line 2: tasks are a number"),
        ("image,tasks\na,\n", "line 2: tasks are a number"),
        ("image,tasks\na,٣\n", "line 2: tasks are a number"),
        ("image,tasks\n,1\n", "line 2: "),
        ("image,tasks\n../a,1\n", "line 2: "),
        ("image,tasks,eligible\na,1,maybe\n", "line 2: eligible is yes, no or empty, not 'maybe'"),
        ('image,tasks\n"a,1\n', "line 2: "),
        ('image,tasks\n"a"x,1\n', "line 2: "),
        ("image,tasks\na\0,1\n", "line 2: "),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, said: str) -> None:
    with pytest.raises(MalformedError) as caught:
        parse_usage(text.encode(), "t.csv")
    assert said in str(caught.value)
    assert str(caught.value).isprintable()


def test_what_is_no_text_is_said_with_its_line() -> None:
    with pytest.raises(MalformedError, match=r"t\.csv, line 3: not UTF-8"):
        parse_usage(b"image,tasks\na,1\n\xff,2\n", "t.csv")


def test_a_file_is_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "usage.csv"
    path.write_bytes(b"image,tasks\na,1\n")
    assert read_usage(str(path)) == (Usage("a", 1, True, 2),)
    monkeypatch.setattr("layerstore.sync.usage.USAGE_BYTES", 10)
    with pytest.raises(LimitError, match=r"usage\.csv"):
        read_usage(str(path))
    with pytest.raises(NotFoundError, match="nowhere"):
        read_usage(str(tmp_path / "nowhere"))
