#!/usr/bin/env bash
# Sets everything up, then runs every check: lint, format, types, tests. Arguments go to pytest.
#
#   bash tools/test.sh                  all of it
#   bash tools/test.sh tests/unit -x    lint and types, then only these tests
#
# A test whose component is missing is skipped with the reason shown; with CI=true that is a failure, but for tests
# of a GPU on a machine without one.
set -uo pipefail
# shellcheck source=tools/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set_up dev examples
cd "$root" || exit
# Meant for the installation; tests of the build decide for themselves.
unset HPCPIPE_REQUIRE_EXTENSION

failed=()
check() {
    say "$*"
    "$python" -m "$@" || failed+=("$1")
}
ran=no
# Either kind of tests may be left out by the arguments, but not both.
check_tests() {
    local code
    say "pytest $*"
    "$python" -m pytest --durations=15 --durations-min=2 "$@"
    code=$?
    ((code == 5)) && return
    ran=yes
    ((code == 0)) || failed+=(pytest)
}
check ruff check
check ruff format --check
check mypy --strict hpcpipe
# Most tests wait for something now and then, so two at a time take little more than half as long.
check_tests -n 2 -m "not alone" "$@"
check_tests -m alone "$@"
[[ $ran == yes ]] || failed+=("pytest, which found no such test")

if ((${#failed[@]})); then
    die "failed: ${failed[*]}"
fi
say "all checks passed"
