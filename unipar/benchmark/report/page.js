"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const DASHES = {solid: "", dash: "7 4", dot: "2 3", dashdot: "7 3 2 3", longdash: "11 4"};
const MARKS = {
  circle: "\u25cf", square: "\u25a0", diamond: "\u25c6", "triangle-up": "\u25b2", cross: "\u271a",
  x: "\u2716", "triangle-down": "\u25bc", star: "\u2605",
};
const ROOMY = 600;

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function inTheme(value) {
  if (!dark.matches) return value;
  let written = JSON.stringify(value);
  data.light.forEach((light, place) => { written = written.replaceAll(light, data.dark[place]); });
  return JSON.parse(written);
}

function frame() {
  const axis = {
    gridcolor: color("--line"), zerolinecolor: color("--line"), linecolor: color("--quiet"),
    tickcolor: color("--quiet"), ticks: "outside", ticklen: 4,
  };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: {family: getComputedStyle(document.body).fontFamily, size: 12, color: color("--text")},
    hoverlabel: {
      bgcolor: color("--raised"), bordercolor: color("--line"), font: {color: color("--text")},
    },
    xaxis: axis, yaxis: axis,
  };
}

function shape(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text) element.textContent = text;
  return element;
}

// A line with its dash and mark, or a box with its pattern: what tells it apart without color.
function swatch(traces) {
  const svg = shape("svg", {width: 30, height: 14, "aria-hidden": "true"});
  for (const trace of traces) {
    const mode = trace.mode || "";
    if (mode.includes("lines")) {
      svg.append(shape("line", {
        x1: 0, x2: 30, y1: 7, y2: 7, stroke: trace.line.color, "stroke-width": 2,
        "stroke-dasharray": DASHES[trace.line.dash] || "",
      }));
    }
    if (mode.includes("markers")) {
      const fill = trace.marker.color || trace.line.color;
      const mark = MARKS[trace.marker.symbol];
      svg.append(shape("text", {x: 15, y: 12, fill, "text-anchor": "middle", "font-size": 13}, mark));
    }
    if (trace.type === "bar") {
      const pattern = trace.marker.pattern.shape;
      const text = {
        x: 15, y: 12, fill: color("--page"), "text-anchor": "middle", "font-size": 13,
        "font-weight": 700,
      };
      svg.append(shape("rect", {width: 30, height: 14, rx: 2, fill: trace.marker.color}));
      svg.append(shape("text", text, pattern.repeat(3)));
    }
  }
  return svg;
}

// Not plotly's own legend: it neither wraps on a telephone nor can be reached from a keyboard.
function drawLegend(list, chart, traces, hidden) {
  const groups = new Map();
  traces.forEach((trace, index) => {
    if (trace.type === "box") return;
    const key = trace.legendgroup || trace.name;
    groups.set(key, [...(groups.get(key) || []), index]);
  });
  list.replaceChildren();
  for (const [key, indices] of groups) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(swatch(indices.map((index) => traces[index])));
    const label = document.createElement("span");
    label.innerHTML = indices.map((index) => traces[index].name).join(" \u00b7 ");
    button.append(label);
    button.setAttribute("aria-pressed", String(!hidden.has(key)));
    button.addEventListener("click", () => {
      if (!hidden.delete(key)) hidden.add(key);
      button.setAttribute("aria-pressed", String(!hidden.has(key)));
      Plotly.restyle(chart, {visible: !hidden.has(key)}, indices);
    });
    const item = document.createElement("li");
    item.append(button);
    list.append(item);
  }
}

const hiddenIn = {};

function draw(key) {
  const {data: traces, layout} = inTheme(data.figures[key]);
  const hidden = (hiddenIn[key] ||= new Set());
  for (const trace of traces) trace.visible = !hidden.has(trace.legendgroup || trace.name);
  layout.template = {layout: frame()};
  const chart = document.getElementById(`chart-${key}`);
  if (layout.yaxis.ticktext && chart.clientWidth > ROOMY) {
    layout.yaxis.ticktext = layout.yaxis.ticktext.map((text) => text.replaceAll("<br>", ""));
  }
  const options = {responsive: true, displayModeBar: false, displaylogo: false};
  drawLegend(document.getElementById(`legend-${key}`), chart, traces, hidden);
  return Plotly.react(chart, traces, layout, options);
}

// What is folded has no width yet: it is drawn when it is unfolded.
function drawAll() {
  const shown = (key) => !document.getElementById(`chart-${key}`).closest("details:not([open])");
  return Promise.all(Object.keys(data.figures).filter(shown).map(draw));
}

async function loadPlotly() {
  const packed = document.getElementById("plotly").textContent;
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

function compare(a, b) {
  const numbers = a !== "" && b !== "" && !Number.isNaN(Number(a)) && !Number.isNaN(Number(b));
  return numbers ? Number(a) - Number(b) : a.localeCompare(b);
}

function sortBy(button) {
  const header = button.closest("th");
  const table = header.closest("table");
  const place = [...header.parentNode.children].indexOf(header);
  const before = header.getAttribute("aria-sort");
  const descending = before ? before === "ascending" : header.dataset.first === "descending";
  for (const other of header.parentNode.children) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const body = table.tBodies[0];
  const value = (row) => row.children[place].dataset.value;
  const rows = [...body.rows];
  rows.sort((a, b) => {
    // What is not known stays below, whichever way.
    if (value(a) === "" || value(b) === "") return (value(a) === "") - (value(b) === "");
    return descending ? compare(value(b), value(a)) : compare(value(a), value(b));
  });
  body.append(...rows);
}

for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => sortBy(button));
}

if (Object.keys(data.figures).length) {
  if (typeof DecompressionStream === "undefined") {
    for (const chart of document.querySelectorAll(".chart")) {
      chart.textContent = "This browser cannot unpack the charts: it needs DecompressionStream.";
    }
  } else {
    loadPlotly().then(drawAll).then(() => {
      document.documentElement.dataset.drawn = "yes";
      dark.addEventListener("change", drawAll);
      for (const folded of document.querySelectorAll("details[data-chart]")) {
        if (folded.open) draw(folded.dataset.chart);
        folded.addEventListener("toggle", () => folded.open && draw(folded.dataset.chart));
      }
    });
  }
}
