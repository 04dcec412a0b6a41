"""A group of MySQL servers (Group Replication), on loopback, with one primary or several."""

import socket
import time
from pathlib import Path

from typing_extensions import Self

from tests.servers.base import StartFailed
from tests.servers.mysql import ACCOUNT, MySQL
from tests.servers.place import reserved_port
from tests.servers.process import own

GROUP = "5a5a5a5a-5a5a-11f1-8a57-5a5a5a5a5a5a"
#: No statement of it is sent to the other members: each has the same.
UNLOGGED = "SET sql_log_bin = 0;\n"
ONLINE_SECONDS = 120.0
#: without a majority of its group a member is nobody's, whatever its own state is
MEMBER = (
    "SELECT MAX(IF(member_id = @@global.server_uuid, member_state, NULL)) FROM"
    " performance_schema.replication_group_members HAVING SUM(member_state <> 'UNREACHABLE') * 2 > COUNT(*)"
)


class GroupMember(MySQL):
    """A member of a group: its first one, or one that joins those given.

    :param multi_primary: each member is a primary, and not the first one only.
    """

    kind = "group_replication"

    def __init__(self, *peers: "GroupMember", multi_primary: bool = True) -> None:
        super().__init__()
        self.name = f"group{len(peers) + 1}"
        #: all members, this one included, in the order in which they were made
        self.nodes: list[GroupMember] = [*peers, self]
        for peer in peers:
            peer.nodes.append(self)
        self._multi_primary = multi_primary
        self._group_port: socket.socket | None = None
        #: it has been a member, whose clients would otherwise write to it alone before it has joined again
        self._joined = False

    def start(self) -> Self:
        """Start the server; the first one begins a group if no other one runs, and any other one joins it."""
        if self._group_port is None:
            self._group_port = reserved_port(self.host)
        return super().start()

    @property
    def address(self) -> str:
        """Where the other members reach this one."""
        assert self._group_port is not None
        return f"{self.host}:{self._group_port.getsockname()[1]}"

    @property
    def _can_be_joined(self) -> bool:
        return self.running and self.execute(MEMBER) in ("ONLINE", "RECOVERING")

    def _prepare(self) -> None:
        super()._prepare()
        account = self.directory / "account.sql"
        names = {"database": self.database, "user": self.user, "password": self.password}
        account.write_text(UNLOGGED + ACCOUNT.format(**names))
        own(account)

    def _command(self) -> list[str | Path]:
        several = "ON" if self._multi_primary else "OFF"
        single = "OFF" if self._multi_primary else "ON"
        left_out = ("--skip-log-bin", *([f"--init-file={self.directory}/account.sql"] if self._joined else []))
        return [
            # with a certificate that is given, MySQL makes no RSA keys, by which the members log in to one another
            *(word for word in super()._command() if word not in left_out and not str(word).startswith("--ssl-")),
            *(["--super-read-only=ON"] if self._joined else []),
            f"--server-id={self.port}",
            "--log-bin",
            "--gtid-mode=ON",
            "--enforce-gtid-consistency=ON",
            f"--report-host={self.host}",
            "--plugin-load-add=group_replication.so",
            f"--group-replication-group-name={GROUP}",
            "--group-replication-start-on-boot=OFF",
            f"--group-replication-local-address={self.address}",
            f"--group-replication-group-seeds={','.join(node.address for node in self.nodes)}",
            "--group-replication-ip-allowlist=127.0.0.1/8",
            "--group-replication-recovery-get-public-key=ON",
            f"--group-replication-single-primary-mode={single}",
            f"--group-replication-enforce-update-everywhere-checks={several}",
            # a member that stops answering is given up soon, and one that is cut off gives up, too
            "--group-replication-member-expel-timeout=0",
            "--group-replication-unreachable-majority-timeout=3",
        ]

    def _run(self) -> None:
        super()._run()
        source = f"SOURCE_USER = '{self.user}', SOURCE_PASSWORD = '{self.password}'"
        deadline = time.monotonic() + ONLINE_SECONDS
        while True:
            try:
                first = not any(node._can_be_joined for node in self.nodes if node is not self)
                self.execute(
                    f"SET GLOBAL group_replication_bootstrap_group = {int(first)}",
                    f"CHANGE REPLICATION SOURCE TO {source} FOR CHANNEL 'group_replication_recovery'",
                    "START GROUP_REPLICATION",
                    "SET GLOBAL group_replication_bootstrap_group = 0",
                )
                break
            except Exception as error:  # the others have not expelled yet what it was before a crash
                if time.monotonic() > deadline:
                    raise StartFailed(f"{self.name} doesn't join its group: {error}") from error
                time.sleep(0.2)
        while (state := self.execute(MEMBER)) != "ONLINE":
            if time.monotonic() > deadline:
                raise StartFailed(f"{self.name} is {state} in its group")
            time.sleep(0.05)
        self._joined = True

    def heal(self) -> None:
        """Bring the member back: one that the others have given up, or that has given up, is started again."""
        self.resume()
        if not self.running:
            self.start()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            if self.execute(MEMBER) == "ONLINE":
                return
            time.sleep(0.2)
        self.restart()

    def catch_up(self) -> None:
        """Wait until this member has applied all that any of them has committed."""
        self.execute("SET SESSION group_replication_consistency = 'BEFORE'", "SELECT 1")

    def _discard(self) -> None:
        if self._group_port is not None:
            self._group_port.close()
            self._group_port = None
        for node in self.nodes:
            if node is not self:
                node.nodes.remove(self)
        self.nodes = [self]


def group_replication(size: int = 3, *, multi_primary: bool = True) -> list[GroupMember]:
    """Start a group."""
    nodes: list[GroupMember] = []
    for _ in range(size):
        nodes.append(GroupMember(*nodes, multi_primary=multi_primary).start())
    return nodes
