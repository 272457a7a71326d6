// Puts the drawings into the page and the buttons to work.

const { runs, figures, lanes, waits } = JSON.parse(document.getElementById("data").textContent);

const charts = [...document.querySelectorAll(".chart")].map((holder, number) => new Chart(holder, { number, ...figures[number] }));
for (const holder of document.querySelectorAll("[data-lanes]")) {
  const told = lanes[Number(holder.dataset.lanes)];
  if (told) new Lanes(holder, told);
}

function choose(name, change) {
  const buttons = [...document.querySelectorAll(`button[data-${name}]`)];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      for (const one of buttons) one.setAttribute("aria-pressed", String(one === button));
      change(button.dataset[name]);
    });
  }
}

if (charts.length) {
  choose("x", (value) => {
    how.x = value;
    curves.reset();
    stretch(charts);
  });
  choose("y", (value) => {
    how.log = value === "log";
    curves.changed();
  });
  for (const button of document.querySelectorAll("button[data-run]")) {
    button.addEventListener("click", () => {
      const run = Number(button.dataset.run);
      if (!how.hidden.delete(run)) how.hidden.add(run);
      button.setAttribute("aria-pressed", String(!how.hidden.has(run)));
      stretch(charts);
      curves.changed();
    });
  }
  const workers = document.getElementById("workers");
  document.getElementById("with-workers").hidden = !figures.some((one) => one.series.some((series) => series.worker !== null));
  workers.addEventListener("change", () => {
    how.workers = workers.checked;
    curves.changed();
  });
  const smooth = document.getElementById("smooth");
  smooth.addEventListener("input", () => {
    how.smooth = Number(smooth.value);
    curves.changed();
  });
  const middle = () => (curves.lo + curves.hi) / 2;
  document.getElementById("zoom-in").addEventListener("click", () => curves.zoom(middle(), 0.5));
  document.getElementById("zoom-out").addEventListener("click", () => curves.zoom(middle(), 2));
  document.getElementById("reset").addEventListener("click", () => curves.reset());
  stretch(charts);
}

const hatches = element("svg", { width: 0, height: 0, "aria-hidden": "true", class: "skip" });
for (const kind of ["dead", "stalled"]) {
  const attributes = { id: `hatch-${kind}`, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: kind === "dead" ? "rotate(45)" : "rotate(-45)" };
  hatches.append(element("pattern", attributes, element("path", { class: `hatch-${kind}`, d: "M0 0V6" })));
}
document.body.append(hatches);

// On paper nobody can open anything.
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  for (const one of closed) one.open = true;
});
addEventListener("afterprint", () => {
  for (const one of closed) one.open = false;
});
