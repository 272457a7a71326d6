"""What can happen to the container of a run, and to its node."""

from __future__ import annotations

from collections.abc import Iterator

from tests.lab.matrix import Scene, fault


@fault
def the_container_was_rebooted(scene: Scene) -> Iterator[None]:
    scene.start()
    scene.lab.reboot(scene.vmid)
    yield


@fault
def the_container_is_frozen(scene: Scene) -> Iterator[None]:
    scene.start()
    scene.lab.freeze(scene.vmid)
    yield
    scene.lab.thaw(scene.vmid)


@fault
def the_container_is_stopped(scene: Scene) -> Iterator[None]:
    scene.start()
    scene.lab.stop(scene.vmid)
    yield
    scene.lab.start(scene.vmid)
