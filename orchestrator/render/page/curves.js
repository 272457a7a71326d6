// Figures over steps or time, runs over one another. All charts share one range, so that they stay below each other.

const HEIGHT = 250;
const EDGE = { left: 54, right: 10, top: 8, bottom: 24 };

const how = { x: "step", log: false, smooth: 0, workers: false, hidden: new Set() };
const curves = new View();

// Where a series lies, as it is looked at now.
function places(series) {
  return how.x === "step" ? series.step : series.at;
}

// The index of the last place up to `x`; -1: none.
function upTo(list, x) {
  let [low, high] = [0, list.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] <= x) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

// An exponential mean that begins anew after a gap, and does not lean on where it began.
function smoothed(series, weight) {
  const apart = new Set(series.gaps[how.x]);
  let [sum, count] = [0, 0];
  return series.mean.map((value, n) => {
    if (apart.has(n)) [sum, count] = [0, 0];
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    count = weight * count + 1 - weight;
    return sum / count;
  });
}

class Chart {
  constructor(holder, told) {
    this.told = told;
    this.plot = holder.querySelector(".plot");
    this.readout = holder.querySelector(".readout");
    this.about = holder.querySelector(".about");
    this.svg = element("svg", { tabindex: 0, role: "application" });
    this.plot.append(this.svg);
    gestures(this.svg, curves, () => [EDGE.left, this.width - EDGE.right], () => this.steps());
    this.svg.addEventListener("focus", () => this.readout.setAttribute("aria-live", "polite"));
    this.svg.addEventListener("blur", () => this.readout.removeAttribute("aria-live"));
    curves.drawings.push(() => this.draw());
    new ResizeObserver(() => curves.changed()).observe(this.plot);
  }

  get shown() {
    return this.told.series.filter((one) => !how.hidden.has(one.run) && (how.workers || one.worker === null));
  }

  // Every place of every series, once, in order.
  steps() {
    return [...new Set(this.shown.flatMap((one) => places(one)))].sort((a, b) => a - b);
  }

  draw() {
    this.width = Math.max(this.plot.clientWidth, 200);
    const [width, height] = [this.width, HEIGHT];
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const ends = [curves.lo, curves.hi].map(how.x === "step" ? (value) => Math.round(value).toLocaleString("en") : duration);
    this.svg.setAttribute("aria-label", `${this.told.title}, ${how.x} ${ends.join(" to ")}; arrows read, plus and minus zoom`);
    const x = (value) => EDGE.left + ((value - curves.lo) / (curves.hi - curves.lo)) * (width - EDGE.left - EDGE.right);
    const seen = this.shown.map((one) => this.part(one));
    const [low, high, dropped] = this.bounds(seen);
    const id = `clip-${this.told.number}`;
    const box = { x: EDGE.left, y: EDGE.top, width: width - EDGE.left - EDGE.right, height: height - EDGE.top - EDGE.bottom };
    const drawn = [element("clipPath", { id }, element("rect", box))];
    drawn.push(element("rect", { ...box, class: "grid" }));
    const at = curves.cursor === null ? "" : how.x === "step" ? `step ${Math.round(curves.cursor).toLocaleString("en")}` : duration(curves.cursor);
    const lost = dropped ? `${dropped.toLocaleString("en")} points of 0 or less have no place on a log scale` : "";
    this.about.textContent = [at, lost].filter(Boolean).join("; ");
    if (low === null) {
      drawn.push(element("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing was written down here"));
      this.svg.replaceChildren(...drawn);
      this.read(seen);
      return;
    }
    const scale = how.log ? Math.log10 : (value) => value;
    const [bottom, top] = this.padded(scale(low), scale(high));
    const y = (value) => height - EDGE.bottom - ((scale(value) - bottom) / (top - bottom)) * box.height;
    drawn.push(...this.axes(x, y, bottom, top, box));
    const inside = element("g", { "clip-path": `url(#${id})` });
    for (const one of seen) inside.append(...this.curve(one, x, y));
    if (curves.picked) {
      const [a, b] = curves.picked.map(x).sort((one, other) => one - other);
      inside.append(element("rect", { class: "picked", x: a, y: box.y, width: b - a, height: box.height }));
    }
    if (curves.cursor !== null) {
      inside.append(element("path", { class: "cursor", d: `M${x(curves.cursor)} ${box.y}v${box.height}` }));
      for (const one of seen) {
        const n = this.under(one.series);
        if (n !== null && one.y[n] !== null && (!how.log || one.y[n] > 0)) {
          const at = { cx: x(places(one.series)[n]), cy: y(one.y[n]), r: 4 };
          inside.append(element("circle", { class: `dot fill-${runs[one.series.run].colour}`, ...at }));
        }
      }
    }
    drawn.push(inside);
    this.svg.replaceChildren(...drawn);
    this.read(seen);
  }

  // The points of a series in the range, and the one on either side of it.
  part(series) {
    const at = places(series);
    const first = Math.max(0, upTo(at, curves.lo));
    const last = Math.min(at.length - 1, upTo(at, curves.hi) + 1);
    return { series, first, last, y: how.smooth ? smoothed(series, how.smooth) : series.mean };
  }

  bounds(seen) {
    let [low, high, dropped] = [null, null, 0];
    for (const { series, first, last, y } of seen) {
      const at = places(series);
      for (let n = first; n <= last; n += 1) {
        if (at[n] < curves.lo || at[n] > curves.hi) continue;
        const values = [series.low[n], series.high[n], y[n]].filter((value) => value !== null);
        const fit = how.log ? values.filter((value) => value > 0) : values;
        if (values.length > fit.length) dropped += 1;
        for (const value of fit) {
          if (low === null || value < low) low = value;
          if (high === null || value > high) high = value;
        }
      }
    }
    return [low, high, dropped];
  }

  padded(bottom, top) {
    const room = (top - bottom) * 0.04 || Math.abs(top) * 0.05 || 1;
    return [bottom - room, top + room];
  }

  axes(x, y, bottom, top, box) {
    const drawn = [];
    let marks = how.log ? [] : ticks(bottom, top, 5);
    if (how.log) {
      for (let power = Math.floor(bottom); power <= top; power += 1) {
        for (const one of top - bottom > 2.5 ? [1] : [1, 2, 5]) marks.push(one * 10 ** power);
      }
      marks = marks.filter((one) => Math.log10(one) >= bottom && Math.log10(one) <= top);
      if (marks.length < 2) marks = ticks(10 ** bottom, 10 ** top, 4).filter((one) => one > 0);
    }
    const texts = labels(marks);
    for (const [n, value] of marks.entries()) {
      const at = y(value);
      drawn.push(element("path", { class: "grid", d: `M${box.x} ${at}h${box.width}` }));
      drawn.push(element("text", { x: box.x - 6, y: at + 4, "text-anchor": "end" }, texts[n]));
    }
    const count = Math.max(2, Math.floor(box.width / 90));
    const steps = how.x === "step";
    const whole = (value) => [value, value.toLocaleString("en", { maximumFractionDigits: 2 })];
    const below = steps ? ticks(curves.lo, curves.hi, count).map(whole) : timeTicks(curves.lo, curves.hi, count);
    for (const [value, text] of below) {
      const at = Math.min(Math.max(x(value), box.x + 8), box.x + box.width - text.length * 3);
      drawn.push(element("path", { class: "grid", d: `M${x(value)} ${box.y + box.height}v4` }));
      drawn.push(element("text", { x: at, y: HEIGHT - 7, "text-anchor": "middle" }, text));
    }
    return drawn;
  }

  curve({ series, first, last, y: values }, x, y) {
    const at = places(series);
    const apart = new Set(series.gaps[how.x]);
    const fits = (value) => value !== null && (!how.log || value > 0);
    const line = (figures) => {
      const path = [];
      let open = false;
      for (let n = first; n <= last; n += 1) {
        if (!fits(figures[n])) {
          open = false;
          continue;
        }
        const alone = !open || apart.has(n);
        path.push(`${alone ? "M" : "L"}${x(at[n]).toFixed(1)} ${y(figures[n]).toFixed(1)}${alone ? "h0" : ""}`);
        open = true;
      }
      return path.join("");
    };
    const { colour, dash } = runs[series.run];
    const kind = `curve run-${colour} dash-${dash % 6}${series.worker === null ? "" : " worker"}`;
    const drawn = [];
    if (series.worker === null && series.width > 1) {
      drawn.push(element("path", { class: `band fill-${colour}`, d: this.band(series, first, last, apart, fits, x, y) }));
    }
    if (how.smooth) drawn.push(element("path", { class: `${kind} raw`, d: line(series.mean) }));
    drawn.push(element("path", { class: kind, d: line(values) }));
    return drawn;
  }

  band(series, first, last, apart, fits, x, y) {
    const at = places(series);
    const pieces = [[]];
    for (let n = first; n <= last; n += 1) {
      if (apart.has(n) || !fits(series.low[n])) pieces.push([]);
      if (fits(series.low[n])) pieces[pieces.length - 1].push(n);
    }
    return pieces.filter((piece) => piece.length > 1).map((piece) => {
      const over = piece.map((n) => `${x(at[n]).toFixed(1)} ${y(series.high[n]).toFixed(1)}`);
      const under = piece.map((n) => `${x(at[n]).toFixed(1)} ${y(series.low[n]).toFixed(1)}`).reverse();
      return `M${[...over, ...under].join("L")}Z`;
    }).join("");
  }

  // The point that the cursor is at; null where nothing was written down.
  under(series) {
    if (curves.cursor === null) return null;
    const at = places(series);
    const n = upTo(at, curves.cursor);
    if (n < 0) return null;
    if (n === at.length - 1) return curves.cursor - at[n] <= (how.x === "step" ? series.width : 0) + (curves.hi - curves.lo) / 200 ? n : null;
    if (series.gaps[how.x].includes(n + 1)) return curves.cursor - at[n] <= (curves.hi - curves.lo) / 200 ? n : null;
    return curves.cursor - at[n] > at[n + 1] - curves.cursor ? n + 1 : n;
  }

  read(seen) {
    const lines = seen.map(({ series, y }) => {
      const line = document.createElement("li");
      const run = runs[series.run];
      const swatch = element("svg", { class: "swatch", viewBox: "0 0 28 8", "aria-hidden": "true" });
      swatch.append(element("path", { class: `run-${run.colour} dash-${run.dash % 6}`, d: "M0 4h28" }));
      const n = curves.cursor === null ? series.mean.length - 1 : this.under(series);
      const name = series.worker || (runs.length > 1 ? run.id : "");
      line.append(swatch, `${name ? `${name}: ` : ""}${n === null ? "nothing was written down here" : this.value(series, y, n)}`);
      return line;
    });
    this.readout.replaceChildren(...lines);
  }

  value(series, y, n) {
    const spread = series.n[n] > 1 ? ` (${figure(series.low[n])} to ${figure(series.high[n])} in ${series.n[n]} steps)` : "";
    const smooth = how.smooth ? `, smoothed ${figure(y[n])}` : "";
    const last = curves.cursor === null ? `, the last: ${series.n[n] > 1 ? "from " : ""}step ${series.step[n].toLocaleString("en")}` : "";
    return `${figure(series.mean[n])}${spread}${smooth}${last}`;
  }
}

// The range of all that is shown.
function stretch(charts) {
  let [low, high] = [Infinity, -Infinity];
  for (const chart of charts) {
    for (const one of chart.told.series) {
      const at = places(one);
      if (how.hidden.has(one.run) || !at.length) continue;
      low = Math.min(low, at[0]);
      high = Math.max(high, at[at.length - 1]);
    }
  }
  if (low <= high) curves.span(low, high);
}
