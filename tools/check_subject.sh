#!/bin/sh
# check_subject.sh FILE: whether a commit message begins with a subject as CONTRIBUTING.md has it.
subject=$(head -n 1 "$1")
case $subject in "Merge "* | "Revert "*) exit 0 ;; esac
if [ "${#subject}" -gt 72 ]; then
  echo "the commit subject has ${#subject} characters, expected at most 72: $subject" >&2
  exit 1
fi
if ! printf '%s\n' "$subject" | grep -qE '^[A-Za-z0-9_.,/ -]+: [^ ].*[^. ]$'; then
  echo "the commit subject is '$subject', expected 'area: what it does', without a full stop," >&2
  echo "e.g. 'logprob: bound peaked rows to 1 ULP'" >&2
  exit 1
fi
