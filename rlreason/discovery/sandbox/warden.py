"""The script between this program and one that nobody trusts: it contains it, reports how it ended, and ends the rest.

    warden            watches the leash (a pipe that its parent holds) and ends everything below it
      first process   PID 1 of a PID namespace where there is one: starts the program, collects orphans, reports
        program       in the namespaces, under Landlock and within the limits

Started as `python -I -S warden.py OPTIONS`, OPTIONS being JSON (see `contained.py`). The status pipe gets JSON lines:
{"protections": {...}} before the program begins, {"exit": code, or minus a signal, "peak_kb": n} after it has ended,
{"broken": text} where it could not be started.
"""

import json
import os
import random
import resource
import select
import signal
import sys

if __name__ == "__main__":  # a script, of which Python knows no package
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import ending  # type: ignore[import-not-found]
    import linux  # type: ignore[import-not-found]
else:
    from rlreason.discovery.sandbox import ending, linux

INNER_ID = 1000  # of the user inside: nobody of importance
CHANNEL = 3  # the file descriptor that the program's side writes its set to
NAMESPACES = {
    "files": linux.CLONE_NEWNS,
    "processes": linux.CLONE_NEWPID,
    "network": linux.CLONE_NEWNET,
    "shared memory": linux.CLONE_NEWIPC,
    "host name": linux.CLONE_NEWUTS,
    "control groups": linux.CLONE_NEWCGROUP,
}
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def main() -> None:
    """Contain and run what the options say."""
    options = json.loads(sys.argv[1])
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent decides, by the leash
    active: dict[str, str] = {}
    spaces = namespaces(active) if options["namespaces"] else set()
    first = os.fork()
    if first == 0:
        os.set_inheritable(options["status"], False)
        first_process(options, active, spaces)
    os.close(options["channel"])
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the end of the output must not wait for this process
    os.dup2(1, 2)
    process = os.pidfd_open(first)
    watched = select.poll()
    watched.register(process, select.POLLIN)
    watched.register(options["leash"], select.POLLIN | select.POLLHUP)
    watched.poll()
    if "processes" in spaces:
        os.kill(first, signal.SIGKILL)  # with the first process of a namespace, the kernel ends all others
    os._exit(0 if ending.end_all() else 1)


def namespaces(active: dict[str, str]) -> set[str]:
    """Enter the namespaces that the system allows; return their names."""
    uid, gid = os.getuid(), os.getgid()
    found: set[str] = set()
    if tried(lambda: (linux.unshare(linux.CLONE_NEWUSER), linux.map_ids(uid, gid, INNER_ID))):
        linux.unshare(linux.CLONE_NEWUSER)
        linux.map_ids(uid, gid, INNER_ID)
        active["user namespace"] = "no privileges outside"
        found.add("users")
    for name, flag in NAMESPACES.items():
        try:
            linux.unshare(flag)
            found.add(name)
        except OSError:
            continue
    if found - {"users"}:
        active["namespaces"] = ", ".join(name for name in NAMESPACES if name in found)
    return found


def tried(action) -> bool:  # type: ignore[no-untyped-def]
    """Return whether an action succeeds in a process of its own, for actions that cannot be undone."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def first_process(options: dict, active: dict[str, str], spaces: set[str]) -> None:
    """Start the program, wait for it and for orphans, report how it ended. Never returns."""
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    status = options["status"]
    try:
        if "files" in spaces:
            mounts(options, active, spaces)
        program = os.fork()
        if program == 0:
            try:
                become(options, active, spaces)
            except BaseException as error:
                os.write(status, line({"broken": f"{type(error).__name__}: {error}"}))
            os._exit(127)
        os.close(options["channel"])
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        while True:
            pid, code, used = os.wait4(-1, 0)
            if pid == program:
                told = {"exit": os.waitstatus_to_exitcode(code), "peak_kb": used.ru_maxrss}
                os.write(status, line(told))
                break
    except BaseException as error:
        os.write(status, line({"broken": f"{type(error).__name__}: {error}"}))
    os._exit(0)


def line(told: dict) -> bytes:
    """Write a line to the status pipe."""
    return json.dumps(told).encode() + b"\n"


def mounts(options: dict, active: dict[str, str], spaces: set[str]) -> None:
    """Make everything read-only, except a scratch folder in memory that ends with the program."""
    linux.mount(None, "/", linux.MS_REC | linux.MS_PRIVATE)
    try:
        linux.all_mounts_read_only()
        active["files"] = "read-only, but for a scratch folder in memory"
    except OSError:
        active["files"] = "a scratch folder in memory"
    with open(options["program"], "rb") as file:
        source = file.read()
    for place in (options["folder"], "/dev/shm"):
        covers = options["folder"].startswith(f"{place}/")  # where temporary files lie in /dev/shm
        if os.path.isdir(place) and not covers:
            linux.mount_tmpfs(place, options["disk_mb"])
    descriptor = os.open(options["program"], os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(descriptor, source)
    os.close(descriptor)
    if "processes" in spaces:
        try:
            linux.mount("proc", "/proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
        except OSError:  # a container that hides parts of /proc
            linux.mount_tmpfs("/proc", 1)
        try:
            with open("/proc/sys/kernel/pid_max", "w") as file:  # of this namespace, from Linux 6.14 on
                file.write(str(300 + options["processes"]))  # the first 300 are given once
        except OSError:
            pass


def become(options: dict, active: dict[str, str], spaces: set[str]) -> None:
    """Drop what the program must not have, and execute it."""
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    for number in range(1, signal.NSIG):
        if number not in (signal.SIGKILL, signal.SIGSTOP) and signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    os.umask(0o077)
    os.chdir(options["folder"])
    if "users" not in spaces and os.getuid() == 0:
        without_root(options, active)
    if "users" not in spaces and os.getuid() != 0:
        bound_processes(options["processes"])
    own_proc = ["/proc"] if "processes" in spaces else ["/proc/cpuinfo", "/proc/meminfo", "/proc/stat"]
    if options["landlock"]:
        try:
            shared = ["/dev/shm"] if "files" in spaces else []  # else what is left there would stay
            version = linux.landlock(
                [*options["readable"], *own_proc], options["listable"], [options["folder"], *shared], DEVICES
            )
            active["Landlock"] = f"version {version}"
        except OSError:
            pass
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    if (machine := os.uname().machine) in linux.REFUSED:
        architecture, above, socket, calls = linux.REFUSED[machine]
        try:
            linux.refuse_system_calls(calls, socket, architecture, above)
            active["seccomp"] = f"no network, {len(calls)} system calls refused"
        except OSError:
            pass
    limits(options)
    os.nice(5)  # who watches goes first
    active["limits"] = "memory, processor time, file size, open files"
    os.write(options["status"], line({"protections": active, "spaces": sorted(spaces)}))
    source = os.open(os.devnull, os.O_RDONLY) if options["stdin"] is None else options["stdin"]
    os.dup2(source, 0)
    os.dup2(options["channel"], CHANNEL)
    os.closerange(CHANNEL + 1, 4096)
    os.set_inheritable(CHANNEL, True)
    os.execve(options["command"][0], options["command"], {})


def without_root(options: dict, active: dict[str, str]) -> None:
    """As root without a user namespace, become nobody if Python is then readable, else drop root's privileges."""
    nobody = 65534

    def switch() -> None:
        os.setgroups([])
        os.setresgid(nobody, nobody, nobody)
        os.setresuid(nobody, nobody, nobody)
        if not all(os.access(path, os.R_OK | os.X_OK) for path in options["needed"]):
            raise PermissionError

    if tried(switch):
        for place in (options["folder"], options["program"]):
            os.chown(place, nobody, nobody)
        switch()
        active["user"] = "nobody"
        return
    try:
        linux.drop_privileges_of_root()
        active["user"] = "root, without privileges"
    except OSError:
        pass


def limits(options: dict) -> None:
    """Set resource limits of each process. Their total use is watched by `contained.py`."""
    memory, megabyte = options["memory_mb"], 2**20
    seconds = int(options["timeout_s"] * options["cpus"]) + 5
    for which, limit in (
        (resource.RLIMIT_DATA, memory * megabyte),
        (resource.RLIMIT_AS, (memory + 4096) * megabyte),  # libraries map more than they use
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, options["disk_mb"] * megabyte),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 64 * 1024),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(which)[1]
        value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(which, (value, value))
    there = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, random.sample(there, min(len(there), options["cpus"])))


def bound_processes(more: int) -> None:
    """Let this user start `more` processes and threads; without a namespace, all of the user's count."""
    there = 0
    for name in os.listdir("/proc"):
        try:
            there += len(os.listdir(f"/proc/{name}/task")) if os.stat(f"/proc/{name}").st_uid == os.getuid() else 0
        except OSError:
            continue
    resource.setrlimit(resource.RLIMIT_NPROC, (there + more, there + more))


if __name__ == "__main__":
    main()
