import pytest

from tf_avgstrategy.tools import worker_processes


@pytest.mark.parametrize(
    "chunks, expected",
    [
        ([], []),
        ([b"a\nb\n"], [b"a", b"b"]),
        ([b"a\n\nb"], [b"a", b"", b"b"]),
        ([b"no", b" end"], [b"no end"]),
        ([b"1%\r2%\r", b"3%\r\ndone"], [b"1%", b"2%", b"3%", b"done"]),
        # One end, though it comes in two pieces.
        ([b"a\r", b"\nb\n", b"\n"], [b"a", b"b", b""]),
        # A progress bar that begins with the return.
        ([b"\r1%", b"\r2%", b"\n"], [b"1%", b"2%"]),
        ([b"\xc3", b"\xa4\n"], ["ä".encode()]),
        ([b"form\x0cfeed\x85\n"], [b"form\x0cfeed\x85"]),
    ],
)
def test_lines(chunks, expected):
    assert list(worker_processes._lines(chunks)) == expected


def test_a_line_comes_as_soon_as_it_ends():
    chunks = iter([b"50%\r", b"100%\r"])
    lines = worker_processes._lines(chunks)
    assert next(lines) == b"50%"
    assert next(chunks) == b"100%\r"


@pytest.mark.parametrize(
    "code, how, exit_code",
    [
        (3, "with exit code 3", 3),
        (-9, "killed by signal SIGKILL", 137),
        (-40, "killed by signal 40", 168),
    ],
)
def test_a_failure_in_words_and_as_exit_code(code, how, exit_code):
    failure = worker_processes._Exit(0, code)
    assert worker_processes._how(failure) == how
    assert worker_processes._exit_code(code) == exit_code
