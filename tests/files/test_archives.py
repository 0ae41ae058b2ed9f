"""What an archive says of itself is proved, or it is an error."""

import errno
import io
import os
import shutil
import struct
import zipfile

import pytest

from tf_avgstrategy.files import archives

EXPECTED = "An archive must be one"
STORED, DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED


def write(path, members, packing=STORED):
    with zipfile.ZipFile(path, "w", packing) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return str(path)


def change(path, name, field, value):
    """Writes a field of 4 bytes of both headers, by its place in the second."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        local = archive.getinfo(name).header_offset
        central = data.index(b"PK\1\2", archive.start_dir)
        while data[central + 46 :][: len(name)] != name.encode():
            central = data.index(b"PK\1\2", central + 1)
    for place in (local - 2, central):
        data[place + field : place + field + 4] = struct.pack("<I", value)
    path.write_bytes(data)


def refused(path, reason):
    message = rf"^An archive must be one, and whole\. .*'{path}' \({reason}\)\."
    return pytest.raises(ValueError, match=message)


@pytest.mark.parametrize("packing", [STORED, DEFLATED])
class TestArchive:
    def test_is_read_in_any_order_and_copied(self, tmp_path, packing):
        data = os.urandom(3000) + bytes(10**6)
        members = [("a.bin", data), ("b/c.txt", b"text"), ("d", b"")]
        path = write(tmp_path / "a.zip", members, packing)
        with archives.Archive(path, EXPECTED) as archive:
            assert archive.names == ["a.bin", "b/c.txt", "d"]
            assert archive.read("b/c.txt", limit=4) == b"text"
            with archive.open("a.bin") as file:
                file.seek(-5, io.SEEK_END)
                assert file.read() == bytes(5)
                file.seek(100)
                assert archive.read("d", limit=0) == b""
                assert file.read(200) == data[100:300]
            (tmp_path / "new").write_bytes(b"new")
            with zipfile.ZipFile(tmp_path / "b.zip", "w") as copy:
                archive.copy(copy, {"b/c.txt": tmp_path / "new"})
        with zipfile.ZipFile(tmp_path / "b.zip") as copy:
            assert copy.read("a.bin") == data
            assert copy.read("b/c.txt") == b"new"
            assert {i.compress_type for i in copy.infolist()} == {packing}

    def test_a_flipped_byte_is_found_before_it_is_read(self, tmp_path, packing):
        path = tmp_path / "a.zip"
        write(path, [("a", os.urandom(5000))], packing)
        data = bytearray(path.read_bytes())
        data[2000] ^= 1
        path.write_bytes(data)
        with archives.Archive(str(path), EXPECTED) as archive:
            with refused(path, ".*(CRC|decompressing).*"):
                archive.open("a")
            with refused(path, ".*(CRC|decompressing).*"):
                archive.extract("a", tmp_path / "b")

    @pytest.mark.parametrize("size, word", [(99, "more"), (101, "less")])
    def test_more_or_less_than_it_says(self, tmp_path, packing, size, word):
        path = tmp_path / "a.zip"
        write(path, [("a", bytes(100)), ("b", bytes(1000))], packing)
        change(path, "a", 24, size)
        if packing == STORED and word == "less":
            reason = "'a' cannot have 101 bytes, packed into 100"
            with refused(path, reason):
                archives.Archive(str(path), EXPECTED)
            return
        with (
            archives.Archive(str(path), EXPECTED) as archive,
            refused(path, f"'a' has {word} than the {size} bytes.*"),
        ):
            archive.open("a")

    def test_more_than_can_be_packed(self, tmp_path, packing):
        path = tmp_path / "a.zip"
        write(path, [("a", bytes(100))], packing)
        change(path, "a", 24, 2**31)
        with refused(path, "'a' cannot have 2147483648 bytes, packed into .*"):
            archives.Archive(str(path), EXPECTED)

    def test_more_than_the_reader_takes(self, tmp_path, packing):
        path = write(tmp_path / "a.zip", [("a", bytes(100))], packing)
        with (
            archives.Archive(path, EXPECTED) as archive,
            refused(path, "'a' has 100 bytes, more than 99"),
        ):
            archive.read("a", limit=99)


class TestRefusals:
    @pytest.mark.filterwarnings("ignore:Duplicate name")
    @pytest.mark.parametrize("second", ["a/b", "a/b/"])
    def test_names_that_are_there_twice(self, tmp_path, second):
        path = write(tmp_path / "a.zip", [("a/b", "1"), (second, "")])
        with refused(path, "'a/b' is there twice"):
            archives.Archive(path, EXPECTED)

    @pytest.mark.parametrize(
        "name",
        ["/a", "../a", "a/../../b", "a\\b", "C:/a", "C:a", "a//b", "./a", ".."],
    )
    def test_names_that_leave_the_folder(self, tmp_path, name):
        path = write(tmp_path / "a.zip", [("a", "1"), (name, "2")])
        with refused(path, ".* is no name within a folder"):
            archives.Archive(path, EXPECTED)

    def test_links(self, tmp_path):
        link = zipfile.ZipInfo("a")
        link.external_attr = 0o120777 << 16
        path = write(tmp_path / "a.zip", [(link, "/etc/passwd")])
        with refused(path, "'a' is neither a file nor a folder"):
            archives.Archive(path, EXPECTED)

    def test_other_packings(self, tmp_path):
        path = write(tmp_path / "a.zip", [("a", "1")], zipfile.ZIP_LZMA)
        with refused(path, "'a' is neither stored nor deflated"):
            archives.Archive(path, EXPECTED)

    def test_parts_that_overlap(self, tmp_path):
        path = tmp_path / "a.zip"
        write(path, [("a", bytes(10**4)), ("b", bytes(10**4))])
        for name in "ab":
            change(path, name, 20, 15_000)
        with refused(path, "its parts are larger than the whole"):
            archives.Archive(str(path), EXPECTED)

    def test_a_disk_without_room_to_unpack(self, tmp_path, monkeypatch):
        path = write(tmp_path / "a.zip", [("a", bytes(10**5))], DEFLATED)
        usage = shutil.disk_usage(tmp_path)._replace(free=10**5 - 1)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        with archives.Archive(path, EXPECTED) as archive:
            with pytest.raises(OSError, match="for 100000 bytes") as info:
                archive.open("a")
            assert info.value.errno == errno.ENOSPC
