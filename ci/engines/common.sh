# Sourced by the scripts of the engines: an environment each, a server on loopback, the audit, the end.
#
#   environment NAME          makes build/engines/NAME; its programs are in "$BIN"
#   serve PORT COMMAND...     starts a server, and waits until it answers
#   audit NAME ARGUMENTS...   audits it; the result goes to kvlab/audit/results/NAME.json
set -eu
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
AUDIT=.venv/bin/python
MODEL=kvlab/checkpoints/passphrase
SERVER=

stop() {
    [ -z "$SERVER" ] || kill "$SERVER" 2>/dev/null || true
    [ -z "$SERVER" ] || wait "$SERVER" 2>/dev/null || true
    SERVER=
}
trap stop EXIT INT TERM

environment() {
    BIN="build/engines/$1/bin"
    [ -x "$BIN/pip" ] || "$PYTHON" -m venv "build/engines/$1"
}

serve() {
    port=$1
    shift
    "$@" >build/engines/server.log 2>&1 &
    SERVER=$!
    for _ in $(seq 120); do
        if curl -s -o /dev/null "http://127.0.0.1:$port/health"; then return 0; fi
        if ! kill -0 "$SERVER" 2>/dev/null; then break; fi
        sleep 2
    done
    echo "the server did not come up; its last words:" >&2
    tail -5 build/engines/server.log >&2
    exit 2
}

audit() {
    name=$1
    shift
    # 0, 1 and 3 are verdicts; anything else means that the audit did not run.
    code=0
    "$AUDIT" -m kvlab.audit "$@" --report "build/engines/report-$name" || code=$?
    case $code in
        0 | 1 | 3) cp "build/engines/report-$name/audit.json" "kvlab/audit/results/$name.json" ;;
        *) exit "$code" ;;
    esac
}
