// A range that is looked at, which several drawings may share, and the gestures that change it.

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

class View {
  constructor() {
    this.whole = [0, 1];
    this.lo = 0;
    this.hi = 1;
    this.cursor = null;
    this.picked = null; // what is being dragged over
    this.drawings = [];
    this.waiting = false;
  }

  get zoomed() {
    return this.lo > this.whole[0] || this.hi < this.whole[1];
  }

  // The whole range. Who looks at a part of it goes on with that.
  span(lo, hi) {
    const { zoomed } = this;
    this.whole = [lo, hi > lo ? hi : lo + 1];
    if (zoomed) this.set(this.lo, this.hi);
    else this.reset();
  }

  set(lo, hi) {
    const [first, last] = this.whole;
    const size = Math.min(Math.max(hi - lo, (last - first) / 1e5), last - first);
    this.lo = Math.min(Math.max(lo, first), last - size);
    this.hi = this.lo + size;
    this.changed();
  }

  zoom(at, factor) {
    this.set(at - (at - this.lo) * factor, at + (this.hi - at) * factor);
  }

  pan(by) {
    this.set(this.lo + by, this.hi + by);
  }

  reset() {
    [this.lo, this.hi] = this.whole;
    this.cursor = this.picked = null;
    this.changed();
  }

  point(at) {
    this.cursor = at === null ? null : Math.min(Math.max(at, this.lo), this.hi);
    this.changed();
  }

  pick(range) {
    this.picked = range;
    this.changed();
  }

  changed() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      for (const draw of this.drawings) draw();
    });
  }
}

// `edges()` gives where in the drawing, in its own units, the range begins and ends; `places()` what the arrows step on.
function gestures(svg, view, edges, places) {
  const fingers = new Map();
  let from = null; // where a mouse began to drag
  let pinch = null; // what lay under both fingers
  let moved = false;

  function at(event) {
    const box = svg.getBoundingClientRect();
    const [left, right] = edges();
    const scale = box.width / svg.viewBox.baseVal.width;
    const share = (event.clientX - box.left - left * scale) / ((right - left) * scale);
    return view.lo + Math.min(Math.max(share, 0), 1) * (view.hi - view.lo);
  }

  function width() {
    const [left, right] = edges();
    return ((right - left) * svg.getBoundingClientRect().width) / svg.viewBox.baseVal.width;
  }

  function spread() {
    const [a, b] = [...fingers.values()].map((one) => one.clientX);
    return [Math.min(a, b), Math.max(a, b)];
  }

  svg.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse" && event.button !== 0) return;
    svg.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, event);
    moved = false;
    if (event.pointerType === "mouse") from = { x: event.clientX, at: at(event), pan: event.shiftKey };
    else if (fingers.size === 2) {
      const [a, b] = [...fingers.values()].sort((one, other) => one.clientX - other.clientX);
      pinch = [at(a), at(b)];
    } else view.point(at(event));
  });

  svg.addEventListener("pointermove", (event) => {
    const before = fingers.get(event.pointerId);
    if (before === undefined) {
      if (event.pointerType === "mouse") view.point(at(event));
      return;
    }
    fingers.set(event.pointerId, event);
    const perPixel = (view.hi - view.lo) / width();
    if (from !== null) {
      moved = moved || Math.abs(event.clientX - from.x) > 4;
      if (from.pan) view.pan((before.clientX - event.clientX) * perPixel);
      else if (moved) view.pick([from.at, at(event)]);
    } else if (pinch !== null && fingers.size === 2) {
      const [a, b] = spread();
      const left = svg.getBoundingClientRect().left + (edges()[0] * width()) / (edges()[1] - edges()[0]);
      const each = (pinch[1] - pinch[0]) / Math.max(b - a, 10);
      view.set(pinch[0] - (a - left) * each, pinch[0] - (a - left) * each + each * width());
    } else if (fingers.size === 1) {
      if (view.zoomed) view.pan((before.clientX - event.clientX) * perPixel);
      view.point(at(event));
    }
  });

  function over(event) {
    fingers.delete(event.pointerId);
    if (fingers.size < 2) pinch = null;
    if (from === null) return;
    const [start, end] = [from.at, event.type === "pointerup" ? at(event) : from.at];
    const picked = moved && !from.pan;
    from = null;
    view.pick(null);
    if (picked && start !== end) view.set(Math.min(start, end), Math.max(start, end));
  }
  svg.addEventListener("pointerup", over);
  svg.addEventListener("pointercancel", over);
  svg.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse" && !fingers.size) view.point(null);
  });
  svg.addEventListener("dblclick", () => view.reset());

  svg.addEventListener("wheel", (event) => {
    // Somebody who scrolls past does not mean to zoom: who does holds Ctrl, pinches, or has clicked here before.
    if (!(event.ctrlKey || event.metaKey || document.activeElement === svg)) return;
    if (event.deltaY > 0 && !view.zoomed && !event.ctrlKey) return;
    event.preventDefault();
    view.zoom(at(event), Math.exp(Math.max(-100, Math.min(100, event.deltaY)) * 0.004));
  }, { passive: false });

  svg.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const middle = view.cursor === null ? (view.lo + view.hi) / 2 : view.cursor;
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step && event.shiftKey) view.pan((step * (view.hi - view.lo)) / 10);
    else if (step) view.point(next(places(), view.cursor, step, view));
    else if (event.key === "Home") view.point(view.lo);
    else if (event.key === "End") view.point(view.hi);
    else if (event.key === "+" || event.key === "=") view.zoom(middle, 0.5);
    else if (event.key === "-") view.zoom(middle, 2);
    else if (event.key === "0" || event.key === "Escape") view.reset();
    else return;
    event.preventDefault();
  });
}

// The place before or after the cursor; the range moves along where that lies outside.
function next(places, cursor, step, view) {
  const inside = places.filter((one) => one >= view.lo && one <= view.hi);
  if (cursor === null) return inside.length ? inside[step > 0 ? 0 : inside.length - 1] : null;
  const small = (view.hi - view.lo) / 1e6;
  const beyond = step > 0 ? places.find((one) => one > cursor + small) : places.findLast((one) => one < cursor - small);
  if (beyond === undefined) return cursor;
  if (beyond < view.lo || beyond > view.hi) view.pan(beyond - (view.lo + view.hi) / 2);
  return beyond;
}

// About `count` round numbers from `lo` to `hi`.
function ticks(lo, hi, count) {
  const rough = (hi - lo) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough) || power;
  const found = [];
  for (let n = Math.ceil(lo / step - 1e-9); n * step <= hi + step * 1e-9; n += 1) found.push(n * step);
  return found;
}

const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];

// Round times and how they are said.
function timeTicks(lo, hi, count) {
  const step = SECONDS.find((one) => one >= (hi - lo) / count);
  if (step === undefined) return ticks(lo, hi, count).map((at) => [at, duration(at)]);
  if (hi - lo < count) {
    const digits = Math.ceil(-Math.log10((hi - lo) / count));
    return ticks(lo, hi, count).map((at) => [at, `${at.toFixed(Math.max(digits, 0))} s`]);
  }
  const found = [];
  for (let n = Math.ceil(lo / step); n * step <= hi; n += 1) found.push([n * step, duration(n * step)]);
  return found;
}

function figure(value) {
  if (value === 0) return "0";
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e9 || size < 1e-3)) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  const digits = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 1 ? 3 : 4;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

// The marks of an axis in short; with as many digits as it takes to tell them from one another.
function labels(marks) {
  const texts = marks.map(short);
  for (let digits = 2; digits < 16 && new Set(texts).size < texts.length; digits += 1) {
    texts.splice(0, texts.length, ...marks.map((value) => String(Number(value.toPrecision(digits)))));
  }
  return texts;
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${figure(value / 1e9)}G`;
  if (size >= 1e6) return `${figure(value / 1e6)}M`;
  if (size >= 1e4) return `${figure(value / 1e3)}k`;
  return figure(value);
}

function duration(seconds) {
  const size = Math.abs(seconds);
  if (size < 10 && !Number.isInteger(seconds)) return `${seconds.toFixed(2)} s`;
  if (size < 60) return `${Number.isInteger(seconds) ? seconds : seconds.toFixed(1)} s`;
  const [d, h, m, s] = [size / 86400, (size / 3600) % 24, (size / 60) % 60, size % 60].map(Math.floor);
  const said = d ? `${d} d ${h} h` : h ? `${h} h ${String(m).padStart(2, "0")} min` : s ? `${m} min ${s} s` : `${m} min`;
  return (seconds < 0 ? "−" : "") + said;
}
