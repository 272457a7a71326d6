// What a run and its workers did when: a lane each. Empty is where nothing was written down.

const LANE = { text: 16, bar: 20, gap: 8, axis: 22 };
const BARS = ["busy", "wait_input", "wait_room", "wait_peers"];
const SIDE = 4;

class Lanes {
  constructor(holder, told) {
    this.told = told;
    this.plot = holder.querySelector(".plot");
    this.readout = holder.querySelector(".readout");
    this.view = new View();
    this.svg = element("svg", { tabindex: 0, role: "application" });
    this.plot.append(this.svg);
    gestures(this.svg, this.view, () => [SIDE, this.width - SIDE], () => this.moments);
    this.moments = [...new Set(told.lanes.flatMap((one) => [...one.parts.flatMap((part) => [part[0], part[1]]), ...one.marks.map((mark) => mark[0])]))].sort((a, b) => a - b);
    this.view.drawings.push(() => this.draw());
    new ResizeObserver(() => this.view.changed()).observe(this.plot);
    this.view.span(told.since, told.until);
  }

  draw() {
    this.width = Math.max(this.plot.clientWidth, 200);
    const each = LANE.text + LANE.bar + LANE.gap;
    const height = each * this.told.lanes.length + LANE.axis;
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${height}`);
    const { lo, hi } = this.view;
    this.svg.setAttribute("aria-label", `time lines, ${duration(lo)} to ${duration(hi)} after the launch; arrows read, plus and minus zoom`);
    const x = (at) => SIDE + ((at - lo) / (hi - lo)) * (this.width - 2 * SIDE);
    const drawn = [];
    const bottom = height - LANE.axis;
    for (const [at, text] of timeTicks(lo, hi, Math.max(2, Math.floor(this.width / 90)))) {
      const place = Math.min(Math.max(x(at), text.length * 3), this.width - text.length * 3);
      drawn.push(element("path", { class: "grid", d: `M${x(at)} 0V${bottom}` }));
      drawn.push(element("text", { x: place, y: height - 7, "text-anchor": "middle" }, text));
    }
    this.told.lanes.forEach((lane, n) => {
      const top = n * each;
      const known = lane.parts.length || lane.marks.length;
      const said = this.view.cursor === null ? (known ? "" : "nothing was written down") : this.under(lane);
      drawn.push(element("text", { class: "lane", x: SIDE, y: top + 12 }, lane.name, element("tspan", { class: "said", dx: 8 }, said)));
      drawn.push(element("rect", { class: "grid", x: SIDE, y: top + LANE.text, width: this.width - 2 * SIDE, height: LANE.bar }));
      drawn.push(...this.parts(lane, x, top + LANE.text), ...this.marks(lane, x, top + LANE.text));
    });
    if (this.view.picked) {
      const [a, b] = this.view.picked.map(x).sort((one, other) => one - other);
      drawn.push(element("rect", { class: "picked", x: a, y: 0, width: b - a, height: bottom }));
    }
    if (this.view.cursor !== null) {
      const at = x(this.view.cursor);
      drawn.push(element("path", { class: "cursor", d: `M${at} 0V${bottom}` }));
      const place = Math.min(Math.max(at, 40), this.width - 40);
      drawn.push(element("rect", { class: "behind", x: place - 40, y: bottom, width: 80, height: LANE.axis }));
      drawn.push(element("text", { class: "lane", x: place, y: height - 7, "text-anchor": "middle" }, duration(this.view.cursor)));
    }
    this.svg.replaceChildren(...drawn);
    this.read();
  }

  parts(lane, x, top) {
    const drawn = [];
    const shares = [];
    for (const [since, until, kind, , share] of lane.parts) {
      if (until < this.view.lo || since > this.view.hi) continue;
      if (share) shares.push([since, until, share]);
      else {
        const left = Math.max(x(since), SIDE);
        const width = Math.max(Math.min(x(until), this.width - SIDE) - left, 1);
        drawn.push(element("rect", { class: `kind-${kind}`, x: left, y: top, width, height: LANE.bar }));
      }
    }
    return [...drawn, ...this.stacks(shares, top)];
  }

  // Busy at the bottom, the waits above it, a column for every two pixels: the mean of what was measured there.
  stacks(shares, top) {
    const columns = Math.floor((this.width - 2 * SIDE) / 2);
    const each = (this.view.hi - this.view.lo) / columns;
    const sums = new Map();
    for (const [since, until, share] of shares) {
      const first = Math.max(0, Math.floor((since - this.view.lo) / each));
      const last = Math.min(columns - 1, Math.floor((until - this.view.lo) / each));
      for (let n = first; n <= last; n += 1) {
        const start = this.view.lo + n * each;
        const overlap = Math.min(until, start + each) - Math.max(since, start);
        if (overlap <= 0) continue;
        const sum = sums.get(n) || [0, 0, 0, 0, 0];
        share.forEach((one, m) => { sum[m] += one * overlap; });
        sum[4] += overlap;
        sums.set(n, sum);
      }
    }
    const paths = BARS.map(() => []);
    for (const [n, sum] of sums) {
      const width = 2 * Math.min(1, Math.max(sum[4] / each, 0.5));
      let base = top + LANE.bar;
      BARS.forEach((_, m) => {
        const size = LANE.bar * Math.min(1, sum[m] / sum[4]);
        base -= size;
        if (size > 0.05) paths[m].push(`M${SIDE + 2 * n} ${base.toFixed(2)}h${width.toFixed(2)}v${size.toFixed(2)}h-${width.toFixed(2)}z`);
      });
    }
    return BARS.flatMap((name, m) => (paths[m].length ? [element("path", { class: `kind-${name}`, d: paths[m].join("") })] : []));
  }

  marks(lane, x, top) {
    const before = {}; // one of a kind stands for those that would cover it
    const shown = lane.marks.filter(([at, kind]) => {
      if (at < this.view.lo || at > this.view.hi || x(at) - (before[kind] ?? -9) < 5) return false;
      before[kind] = x(at);
      return true;
    });
    return shown.map(([at, kind, text]) => {
      const [place, middle] = [x(at), top + LANE.bar / 2];
      const shape = kind === "exception" ? `M${place} ${top + 1}l8 16h-16z` : `M${place} ${middle - 6}l5 6l-5 6l-5 -6z`;
      return element("path", { class: kind, d: shape, stroke: "var(--panel)" }, element("title", {}, text));
    });
  }

  read() {
    const { cursor, lo, hi } = this.view;
    const lines = cursor === null ? [] : this.told.lanes.map((lane) => `${lane.name}: ${this.under(lane)}`);
    const when = cursor === null ? `${duration(lo)} to ${duration(hi)}` : duration(cursor);
    this.readout.textContent = [`${when} after the launch`, ...lines].join("; ");
  }

  // What a lane says of where the cursor is.
  under(lane) {
    const at = this.view.cursor;
    const near = ((this.view.hi - this.view.lo) / this.width) * 5;
    const marks = lane.marks.filter((one) => Math.abs(one[0] - at) <= near).map((one) => one[2]);
    const parts = lane.parts.filter((one) => one[0] <= at && at <= one[1]).slice(-2).map((one) => this.said(one));
    return [...marks, ...parts].join("; ") || "nothing was written down";
  }

  said([, , , text, share]) {
    if (!share) return text;
    const parts = share.map((one, n) => [waits[n], Math.round(one * 100)]).filter(([, percent]) => percent > 0);
    return `${text}: ${parts.map(([name, percent]) => `${name} ${percent} %`).join(", ")}`;
  }
}
