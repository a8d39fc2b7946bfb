"""check_near.py -- plays what stays on the device of an optimizer that is offloaded: the first
`near` elements of each shard, in classes `near_` and by functions of that name."""
from __future__ import annotations

from .check_host import Host
from .check_order import Spans
from .check_steps import Key
from .plan import Flat, Ref, Step


class Near(Host):
    def stays(self, s: Step) -> tuple[Key, Flat]:
        key = self.flat_of(s)
        flat = self.flats[key[0]]
        if not flat.near or s.queue != "main":
            self.fail("nothing of the shard stays on the device")
        return key, flat

    def near_master(self, key: Key) -> Ref:
        """Where the masters of what stays lie; without any, parameters are that."""
        apart = f"near_master.{key[0]}" in self.classes
        return Ref(f"near_master.{key[0]}" if apart else f"real.{key[0]}", key[1])

    def write(self, ref: Ref, flat: Flat, width: int) -> None:
        """The first elements of a shard's masters or parameters."""
        slot = self.touch(ref.cls, ref.index, 0, flat.near * width, True)
        if ref.cls.startswith("real.") and flat.real == "whole":
            slot.held.clear()

    def do_near_init(self, s: Step) -> None:
        key, flat = self.stays(s)
        master = self.near_master(key)
        if s.outs != (master,) or self.ints["l"] != key[1] or key in self.begun:
            self.fail("fills another shard, or twice")
        self.write(master, flat, 4)
        self.begun.add(key)
        if master.cls.startswith("real."):
            self.new(key, 0, flat.near)

    def do_near_cast(self, s: Step) -> None:
        key, flat = self.stays(s)
        if s.ins != (self.near_master(key),) or s.ins[0].cls.startswith("real.") or \
                self.stage or key not in self.begun or len(s.outs) != 1:
            self.fail("rounds another shard")
        self.whole(s.ins[0], False)
        self.copies(s, s.outs, key, flat)

    def do_near_update(self, s: Step) -> None:
        key, flat = self.stays(s)
        states = self.p.states(flat, "near_")
        cut = len(s.outs) - len(states)
        if self.stage != "factor" or self.ints["l"] != key[1] or \
                s.ins != (Ref(f"sum.{key[0]}", key[1]),) or \
                s.outs[cut:] != tuple(Ref(f"{c}.{key[0]}", key[1]) for c in states):
            self.fail("updates another shard, or before the factor is known")
        self.summed(key)
        self.whole(s.ins[0], False)
        self.fixed(s)
        for r in s.outs[cut:]:
            self.whole(r, True)
        if self.stepped.setdefault(key, Spans()).meets(0, flat.near):
            self.fail("updated twice")
        self.stepped[key].add(0, flat.near)
        self.copies(s, s.outs[:cut], key, flat)

    def copies(self, s: Step, fresh: tuple[Ref, ...], key: Key, flat: Flat) -> None:
        """What is made of masters: parameters in their place, or on their way down; in f32 masters
        go down themselves."""
        if not self.away(flat):
            if fresh != (Ref(f"real.{key[0]}", key[1]),):
                self.fail("leaves the parameters elsewhere")
            self.write(fresh[0], flat, self.real)
            self.new(key, 0, flat.near)
        elif len(fresh) != (self.real == 2):
            self.fail("leaves no parameters to go down")
        elif fresh:
            self.descend(fresh[0], key, flat.near)
