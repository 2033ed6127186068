"""Writes down what this Python process does to the world: imported by it because it is on its path.

Each line of the file ``$AUDIT_LOG`` is a JSON list: the process, the event, its arguments as text.
Events are those of :func:`sys.addaudithook`; a hook can't be taken away again.
"""

import json
import os
import sys

EVENTS = {
    *("pickle.find_class", "marshal.loads", "marshal.load", "compile", "exec", "import"),
    *("open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.link", "os.symlink"),
    *("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"),
    *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty"),
    *("urllib.Request", "http.client.connect", "ftplib.connect", "ctypes.dlopen", "shutil.move"),
    *("webbrowser.open", "pty.spawn", "cpython.run_command", "cpython.run_file", "code.__new__"),
}

if "AUDIT_LOG" in os.environ:
    _log = os.open(os.environ["AUDIT_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def _note(event: str, arguments: tuple) -> None:
        if event in EVENTS:
            # Never the arguments' own repr of everything: a code object or a source is enough.
            texts = [str(argument)[:2000] for argument in arguments]
            os.write(_log, (json.dumps([os.getpid(), event, texts]) + "\n").encode())

    sys.addaudithook(_note)
