"""Traces in an object store: read as local ones are, whatever goes wrong on the way is done or said."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import DATA

from paro_advise.advisor.cli import run
from paro_advise.errors import UsageError
from paro_advise.trace_parsers.bytes import local_copy as local_copies
from paro_advise.trace_parsers.remote import store as remote_store
from paro_advise.trace_parsers.remote.objects import is_remote, parse_address, shown_address

pytest.importorskip("obstore", reason="reading from stores needs obstore, which the extra [cloud] installs")
moto_server = pytest.importorskip("moto.server", reason="the store of these tests is moto's server")

RUN = DATA / "zero_runs" / "ddp_acc4"
SECRET = "wJalrXUtnFEMIsecretsecret"


@pytest.fixture(scope="module")
def server():
    made = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    made.start()
    host, port = made.get_host_and_port()
    yield f"http://{host}:{port}"
    made.stop()


@pytest.fixture
def bucket(server, monkeypatch):
    """An S3 bucket with a run's traces, by the variables that S3's own tools read."""
    import boto3

    for name, value in (
        ("AWS_ACCESS_KEY_ID", "AKIATEST"), ("AWS_SECRET_ACCESS_KEY", SECRET), ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", server),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=server)
    client.create_bucket(Bucket="traces")
    for path in sorted(RUN.glob("rank*.json.gz")):
        client.upload_file(str(path), "traces", f"runs/a/{path.name}")
    client.put_object(Bucket="traces", Key="runs/a/notes.html", Body=b"<html>")
    yield client
    for item in client.list_objects_v2(Bucket="traces").get("Contents", []):
        client.delete_object(Bucket="traces", Key=item["Key"])


def said(capsys, *arguments, code=0):
    assert run(list(arguments)) == code
    captured = capsys.readouterr()
    assert SECRET not in captured.out + captured.err
    return captured


def without_paths(document):
    """An analysis without where its inputs lie."""
    document["run"]["inputs"] = sorted((item["sha256"], item["bytes"]) for item in document["run"]["inputs"])
    return document


@pytest.mark.parametrize("address", ["s3://traces/runs/a", "s3://traces/runs/a/", "s3://traces/runs/*/rank*.json.gz"])
def test_a_run_in_a_bucket_is_analysed_as_on_disk(bucket, address, capsys):
    told = json.loads(said(capsys, "analyze", address, "--json", "-", "-q").out)
    assert [item["path"] for item in told["run"]["inputs"]] == [
        f"s3://traces/runs/a/rank{rank}.json.gz" for rank in range(4)
    ]
    here = json.loads(said(capsys, "analyze", str(RUN / "rank*.json.gz"), "--json", "-", "-q").out)
    assert without_paths(told) == without_paths(here)


def test_one_object_and_a_mix_with_local_files(bucket, capsys):
    told = json.loads(
        said(capsys, "analyze", "s3://traces/runs/a/rank0.json.gz", str(RUN / "rank1.json.gz"), "--json", "-", "-q").out
    )
    assert told["run"]["ranks"] == [0, 1]


def test_facts_of_an_object_are_kept_until_it_changes(bucket, capsys, monkeypatch):
    downloads = []
    original = local_copies.download

    def counted(item, path):
        downloads.append(item.url)
        return original(item, path)

    monkeypatch.setattr(local_copies, "download", counted)
    for _ in range(2):
        said(capsys, "analyze", "s3://traces/runs/a/rank0.json.gz", "-q")
    assert len(downloads) == 1
    bucket.upload_file(str(RUN / "rank1.json.gz"), "traces", "runs/a/rank0.json.gz")
    told = json.loads(said(capsys, "analyze", "s3://traces/runs/a/rank0.json.gz", "--json", "-", "-q").out)
    assert len(downloads) == 2
    assert told["run"]["ranks"] == [1]


def test_reports_go_to_a_bucket_and_are_not_overwritten(bucket, capsys):
    target = "s3://traces/reports/run.html"
    said(capsys, "analyze", "s3://traces/runs/a", "-o", target)
    page = bucket.get_object(Bucket="traces", Key="reports/run.html")["Body"].read()
    assert b"paro-data" in page
    assert SECRET.encode() not in page
    assert "E401" in said(capsys, "analyze", "s3://traces/runs/a", "-o", target, code=1).err
    said(capsys, "analyze", "s3://traces/runs/a", "-o", target, "--force", "-q")


def test_traces_of_a_folder_in_a_bucket_are_not_replaced_and_other_objects_are(bucket, capsys):
    for name, code in (("rank1.json.gz", 1), ("run.json", 0), ("run.json", 0), ("report.html", 0), ("report.html", 0)):
        option = "-o" if name.endswith("html") else "--json"
        printed = said(
            capsys, "analyze", "s3://traces/runs/a", option, f"s3://traces/runs/a/{name}", "--force", code=code
        )
        assert ("error[E401]" in printed.err) is (code == 1)
    kept = bucket.get_object(Bucket="traces", Key="runs/a/rank1.json.gz")["Body"].read()
    assert kept == (RUN / "rank1.json.gz").read_bytes()


@pytest.mark.parametrize(
    ("address", "code", "text"),
    [
        ("s3://traces/no/such/run", 3, "nothing found at this address"),
        ("s3://no-such-bucket/run", 3, "s3://no-such-bucket/run"),
        ("s3://key:secret@traces/run", 2, "environment variables"),
        ("s3:///run", 2, "bucket"),
    ],
)
def test_what_is_not_there_is_said(bucket, address, code, text, capsys):
    told = said(capsys, "analyze", address, code=code)
    assert text in told.err
    assert "secret@" not in told.err


def test_an_archive_in_a_bucket_is_refused(bucket, capsys):
    bucket.put_object(Bucket="traces", Key="runs/all.tar.gz", Body=b"x")
    assert "must lie on this machine" in said(capsys, "analyze", "s3://traces/runs/all.tar.gz", code=3).err


@pytest.mark.parametrize(
    "arguments",
    [("analyze", "s3://traces/runs/a", "--with-hta"), ("slice", "s3://traces/runs/a", "-o", "x.json")],
)
def test_what_needs_files_says_so(arguments, capsys):
    assert "files on this machine" in said(capsys, *arguments, code=2).err


class _Web(BaseHTTPRequestHandler):
    """A web server with one trace, which fails as it is told before it serves."""

    name = "rank0.json.gz"
    body = b""
    refusals = 0  # answers of 503 before the first good one
    cut_at: int | None = None  # bytes after which the first good answer breaks off
    ends_at: int | None = None  # bytes beyond which it never gives any
    status = 200
    query = ""  # that an address must have
    refused_methods = ()

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def _answer(self, *, with_body):
        kind = type(self)
        if kind.refusals > 0:
            kind.refusals -= 1
            self.send_response(503)
            self.end_headers()
            return
        if self.command in kind.refused_methods:
            self.send_response(403)
            self.end_headers()
            return
        if kind.status != 200 or self.path != f"/{kind.name}{kind.query}":
            self.send_response(kind.status if kind.status != 200 else 404)
            self.end_headers()
            return
        body, begin = kind.body, 0
        if wanted := self.headers.get("Range"):
            begin = int(wanted.split("=")[1].split("-")[0])
        if kind.ends_at is not None and begin >= kind.ends_at:
            self.send_response(500)
            self.end_headers()
            return
        self.send_response(206 if begin else 200)
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - begin))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Tue, 24 Nov 2026 06:00:00 GMT")
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if with_body:
            end = len(body)
            if kind.cut_at is not None and not begin:
                end, kind.cut_at = kind.cut_at, None
            end = min(end, kind.ends_at or end)
            self.wfile.write(body[begin:end])
            if end < len(body):
                self.close_connection = True

    def log_message(self, *_):
        pass


@contextmanager
def web(**behaviour):
    kind = type("Web", (_Web,), {"body": (RUN / "rank0.json.gz").read_bytes(), **behaviour})
    served = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{served.server_port}/{behaviour.get('name', _Web.name)}"
    finally:
        served.shutdown()
        served.server_close()


@pytest.fixture
def impatient(monkeypatch):
    """Ask again at once, as no test waits for a clock."""
    monkeypatch.setattr(remote_store, "BACKOFF_S", 0.001)


@pytest.mark.parametrize(
    "behaviour", [{}, {"refusals": 3}, {"cut_at": 20_000}], ids=["well", "throttled", "breaks off once"]
)
def test_a_file_of_a_web_server_is_read_whole(behaviour, capsys, impatient):
    with web(**behaviour) as address:
        told = json.loads(said(capsys, "analyze", address, "--json", "-", "-q").out)
    assert (
        told["step_time_us"]
        == json.loads(said(capsys, "analyze", str(RUN / "rank0.json.gz"), "--json", "-", "-q").out)["step_time_us"]
    )
    assert told["run"]["inputs"][0]["path"] == address


@pytest.mark.parametrize("refused", [(), ("HEAD",)], ids=["tells its size", "is signed for reading alone"])
def test_a_signed_address_is_asked_for_as_it_was_given_and_never_shown(refused, capsys, impatient, tmp_path):
    query = f"?X-Signature={SECRET}%2F1&part=a%20b"
    page, document = tmp_path / "run.html", tmp_path / "run.json"
    with web(query=query, refused_methods=refused, cut_at=20_000) as address:
        given = address + query
        told = said(capsys, "analyze", given, str(RUN / "rank1.json.gz"), "-o", str(page), "--json", str(document))
    assert json.loads(document.read_text())["run"]["ranks"] == [0, 1]
    assert SECRET not in page.read_text() + document.read_text()
    assert "next: paro-advise recommend" in told.err


def test_what_cannot_be_reached_is_said_without_its_signature(capsys, impatient, monkeypatch, tmp_path):
    monkeypatch.setattr(remote_store, "MAX_RETRIES", 0)
    monkeypatch.setattr(remote_store, "READ_TRIES", 1)
    given = f"http://127.0.0.1:9/rank0.json.gz?X-Signature={SECRET}"
    page = tmp_path / "run.html"
    said(capsys, "analyze", given, str(RUN / "rank1.json.gz"), "-o", str(page))
    assert SECRET not in page.read_text()
    said(capsys, "analyze", given, code=3)
    said(capsys, "analyze", str(RUN), "-o", given, code=1)


@pytest.mark.parametrize(
    ("address", "variables"),
    [
        ("http://[::1/x.json", {}), ("https://host:abc/x.json", {}), (f"https:///x.json?sig={SECRET}", {}),
        ("az://container/run", {}), ("az://container/run", {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": "?"}),
        ("gs://bucket/run", {"GOOGLE_APPLICATION_CREDENTIALS": "/no/such/file"}),
        ("s3://bucket/run", {"AWS_ENDPOINT_URL": f"http://user:{SECRET}@127.0.0.1:9"}),
    ],
)  # fmt: skip
def test_a_store_that_is_not_set_up_is_no_defect_of_ours(address, variables, capsys, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert "error[E2" in said(capsys, "analyze", address, code=2).err


def test_keys_are_taken_as_they_stand(bucket, capsys):
    for rank in range(2):
        bucket.upload_file(str(RUN / f"rank{rank}.json.gz"), "traces", f"runs/b#1[x]/rank{rank}.json.gz")
    told = json.loads(said(capsys, "analyze", "s3://traces/runs/b#1[x]/rank1.json.gz", "--json", "-", "-q").out)
    assert [item["path"] for item in told["run"]["inputs"]] == ["s3://traces/runs/b#1[x]/rank1.json.gz"]
    told = json.loads(said(capsys, "analyze", "s3://traces/runs/b#1*", "--json", "-", "-q").out)
    assert told["run"]["ranks"] == [0, 1]


def test_an_analysis_in_a_bucket_is_what_the_other_commands_take(bucket, capsys):
    target, page = "s3://traces/kept/run.json", "s3://traces/kept/run.html"
    said(capsys, "analyze", str(RUN), "--json", target, "-o", page)
    said(capsys, "recommend", target, "--device-memory", "80GiB")
    said(capsys, "compare", target, page)
    assert "step_time_us" in said(capsys, "show", page, "--json", "-").out
    assert "paro_advise_" in said(capsys, "export", target, "--prometheus", "-").out


def test_an_object_that_ends_early_is_said_and_salvaged(capsys, impatient, monkeypatch):
    """What came of it is read as a cut file is, and not kept for the next time."""
    monkeypatch.setattr(remote_store, "MAX_RETRIES", 1)
    monkeypatch.setattr(remote_store, "READ_TRIES", 2)
    size = (RUN / "rank0.json.gz").stat().st_size
    ends_at = size // 2
    with web(ends_at=ends_at) as address:
        told = said(capsys, "analyze", address)
    assert f"{size - ends_at:,} bytes of it were not read" in told.err
    assert "Q102" in told.err
    assert "No verdict" in told.out


@pytest.mark.parametrize(("status", "text"), [(403, "denied"), (404, "nothing found at this address")])
def test_what_a_web_server_refuses_is_said(status, text, capsys, impatient):
    with web(status=status) as address:
        assert text in said(capsys, "analyze", address, code=3).err


def test_one_object_that_cannot_be_read_never_ends_the_rest(bucket, capsys, monkeypatch):
    original = local_copies.download

    def denied(item, path):
        if item.url.endswith("rank1.json.gz"):
            remote_store._fail(PermissionError("denied"), item.url)
        return original(item, path)

    monkeypatch.setattr(local_copies, "download", denied)
    told = said(capsys, "analyze", "s3://traces/runs/a")
    assert "rank1.json.gz could not be used" in told.err
    assert "3 of 4 ranks" in told.out


@pytest.mark.parametrize(
    ("text", "root", "key"),
    [
        ("s3://bucket/a/b.json", "s3://bucket", "a/b.json"), ("gs://bucket", "gs://bucket", ""),
        ("az://container/a/b", "az://container", "a/b"), ("s3://bucket/a#1?.json", "s3://bucket", "a#1?.json"),
        ("abfss://box@acct.dfs.core.windows.net/a", "abfss://box@acct.dfs.core.windows.net", "a"),
        ("https://host:8443/a/b%20c.json?sig=1#x", "https://host:8443/a/b%20c.json?sig=1", ""),
    ],
)  # fmt: skip
def test_addresses(text, root, key):
    assert is_remote(text)
    found = parse_address(text)
    assert (found.root, found.key) == (root, key)


def test_an_address_is_shown_without_what_it_may_hide():
    assert shown_address("https://me:pw@host/a?X-Amz-Signature=abc") == "https://host/a"
    with pytest.raises(UsageError):
        parse_address("https://me:pw@host/a")
    assert not is_remote("traces/rank0.json")


def test_local_reading_needs_no_store_library(tmp_path):
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['obstore'] = None\n"
        "from paro_advise.advisor.cli import run\n"
        f"assert run(['analyze', {str(RUN)!r}, '-q']) == 0\n"
        "assert run(['analyze', 's3://bucket/run', '-q']) == 2\n"
        "assert run(['recommend', 's3://bucket/run.json', '-q']) == 2\n"
        f"assert run(['analyze', {str(RUN)!r}, '-q', '--force', '-o', 's3://bucket/run.html']) == 2\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "paro-advise[cloud]" in done.stderr


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Error performing GET http://h/x in 2.511403108s, after 6 retries", "GenericError: "),
        ("Error performing GET http://h/x in 1.503s, after 6 retries", "GenericError: "),
        ("Server returned non-2xx status code: 403: not yours", "access denied"),
        ("<Code>AccessDenied</Code>", "access denied"),
        ("status code: 503: later", "the store refuses for being asked too often"),
    ],
)
def test_digits_of_a_time_are_no_status(text, reason):
    error = type("GenericError", (Exception,), {})(text)
    assert remote_store._reason(error).startswith(reason)


@pytest.mark.parametrize(
    "words",
    [
        ("capture", "-o", "s3://traces/new", "--", "true"),
        ("run", "--plan", "plan.json", "--capture", "s3://traces/new", "--", "true"),
        ("attach", "-o", "s3://traces/new"),
        ("watch", "s3://traces/new"),
        ("index", "s3://traces/"),
        ("demo", "-o", "s3://traces/new"),
        ("switch", "s3://traces/new", "plan.json"),
        ("capture", "-o", "file:///traces/new", "--", "true"),
    ],
)
def test_a_job_writes_into_no_store(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(list(words)) == 2
    assert "must be a folder of this machine, got an address" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", [f"file://{RUN}", "hdfs://cluster/run"])
@pytest.mark.parametrize("words", [("analyze",), ("analyze", str(RUN), "--json"), ("recommend", str(RUN), "-o")])
def test_an_address_of_what_cannot_be_reached_is_no_folder(words, address, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run([*words, address]) == 2
    said = capsys.readouterr().err
    assert "an address must begin with one of s3, s3a, gs, az, azure, abfs, abfss, http, https, got " in said
    assert "a file or folder of this machine is given by its path alone" in said
    assert list(tmp_path.iterdir()) == []


def test_doctor_tells_a_cache_that_cannot_be(monkeypatch, capsys):
    monkeypatch.setenv("PARO_ADVISE_CACHE", "hdfs://cluster/cache")
    assert run(["doctor"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "cache of facts" in line]
    assert "OK" not in line


def test_an_analysis_on_a_web_server_that_gives_whole_files_only_is_taken_as_one(tmp_path, capsys):
    """As Python's own `http.server` does: it answers a request for a range with the whole file."""
    found = said(capsys, "analyze", str(RUN), "--json", "-", "-q").out
    (tmp_path / "run.json").write_text(found)
    here = said(capsys, "recommend", str(tmp_path / "run.json"), "-o", "-", "-q").out
    with web(name="run.json", body=found.encode()) as address:
        there = said(capsys, "recommend", address, "-o", "-", "-q").out
    kept = [
        {key: value for key, value in json.loads(text).items() if key not in ("origin", "plan_id")}
        for text in (here, there)
    ]
    assert kept[0] == kept[1]
