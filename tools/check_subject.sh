#!/bin/sh
# check_subject.sh FILE: whether a commit message begins with a subject as CONTRIBUTING.md has it.
subject=$(head -n 1 "$1")
refuse() {
  echo "the commit subject is '$subject', expected 'area: what it does', $1," >&2
  echo "e.g. 'logprob: bound peaked rows to 1 ULP'" >&2
  exit 1
}
case $subject in "Merge "* | "Revert "*) exit 0 ;; esac
if [ "${#subject}" -gt 72 ]; then
  echo "the commit subject has ${#subject} characters, expected at most 72: $subject" >&2
  exit 1
fi
printf '%s\n' "$subject" | grep -qE '^[A-Za-z0-9_.,/ -]+: [^ ].*[^. ]$' || refuse "without a full stop"
# The usual ways to begin otherwise than with a verb in the imperative; a verb is not looked up.
verb=$(printf '%s\n' "$subject" | sed -E 's/^[^:]*: ([A-Za-z]*).*/\1/')
case $verb in
  a | an | the | A | An | The | this | that | these | what | where | which | how | why | when | more | no | \
    adds | allows | changes | checks | fixes | makes | moves | removes | renames | updates | uses | \
    added | changed | fixed | made | moved | removed | renamed | updated | used | \
    adding | changing | fixing | making | moving | removing | renaming | updating | using)
    refuse "in the imperative, not '$verb'"
    ;;
esac
