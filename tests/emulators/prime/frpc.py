"""The stand-in frpc: what the emulator puts at ``$HOME/.prime/bin/frpc`` with a first line for its interpreter.

It reads the config that the SDK writes, logs in to the emulator's frps, prints what frpc 0.66 prints, reconnects as
frpc does, and ends when the emulator's folder is gone. Only the standard library, and little of it: it has to start in
milliseconds.
"""

import json
import os
import socket
import sys
import time

#: Seconds between two attempts to log in; the real one goes up to 20.
FIRST_DELAY = 0.2
LONGEST_DELAY = 2.0


def log(level: str, place: str, message: str) -> None:
    now = time.time()
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    sys.stdout.write(f"{stamp}.{int(now % 1 * 1000):03d} [{level}] [{place}] {message}\n")
    sys.stdout.flush()


def read_config(path: str) -> dict[str, str]:
    """Read the few ``key = value`` lines there are; Python's own reader of TOML takes longer to import."""
    config = {}
    with open(path) as file:
        for line in file:
            key, separator, value = line.partition("=")
            if separator and not line.startswith("#"):
                config[key.strip()] = value.strip().strip('"')
    return config


def connect(config: dict[str, str]) -> tuple[socket.socket, dict[str, str]]:
    """Log in once; returns the control connection and frps's answer."""
    control = socket.create_connection((config["serverAddr"], int(config["serverPort"])), timeout=10)
    login = {
        "user": config["user"],
        "token": config["auth.token"],
        "binding_secret": config.get("metadatas.binding_secret", ""),
        "pid": os.getpid(),
        "local_ip": config["localIP"],
        "local_port": int(config["localPort"]),
    }
    control.sendall(json.dumps(login).encode() + b"\n")
    answer = b""
    while not answer.endswith(b"\n"):
        received = control.recv(4096)
        if not received:
            raise ConnectionError("EOF")
        answer += received
    control.settimeout(None)
    return control, json.loads(answer)


def serve(config: dict[str, str]) -> bool:
    """Be connected once; returns whether the login went well."""
    log("I", "client/service.go:331", "try to connect to server...")
    try:
        control, answer = connect(config)
    except (OSError, ValueError) as error:
        log("W", "client/service.go:334", f"connect to server error: {error}")
        return False
    if "error" in answer:
        control.close()
        log("W", "client/service.go:334", f"connect to server error: {answer['error']}")
        return False
    run_id, proxy = answer["run_id"], config["name"]
    log("I", "client/service.go:323", f"[{run_id}] login to server success, get run id [{run_id}]")
    log("I", "proxy/proxy_manager.go:180", f"[{run_id}] proxy added: [{proxy}]")
    log("I", "client/control.go:172", f"[{run_id}] [{proxy}] start proxy success")
    try:
        while control.recv(4096):
            pass
    except OSError:
        pass
    control.close()
    log("W", "client/control.go:200", f"[{run_id}] the control connection is closed")
    return True


def main() -> None:
    path = sys.argv[sys.argv.index("-c") + 1]
    log("I", "sub/root.go:149", f"start frpc service for config file [{path}]")
    config = read_config(path)
    delay = FIRST_DELAY
    while os.path.exists(EMULATOR):
        delay = FIRST_DELAY if serve(config) else min(delay * 2, LONGEST_DELAY)
        time.sleep(delay)
    sys.exit(1)


#: A path that exists for as long as the emulator does; filled in when this file is copied.
EMULATOR = "@EMULATOR@"

if __name__ == "__main__":
    main()
