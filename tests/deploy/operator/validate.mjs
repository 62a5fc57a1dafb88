// Reads a JSON list of objects of the Prometheus operator and cert-manager, prints a JSON list of what is wrong with them.
// Two looks: the validators made from the operators' own schemas (patterns, required fields), which let unknown fields pass; and the
// types made from the same schemas, as TypeScript checks literals, which do not. Runs where node_modules lies beside it.
import fs from 'node:fs';
import path from 'node:path';
import ts from 'typescript';

const MODELS = {
  'monitoring.coreos.com/v1': '@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1',
  'cert-manager.io/v1': '@kubernetes-models/cert-manager/cert-manager.io/v1',
};
const problems = [];
const sources = new Map();
const objects = JSON.parse(fs.readFileSync(0, 'utf8'));
for (const [number, object] of objects.entries()) {
  const name = `${object.kind}/${object.metadata?.name}`;
  const from = `${MODELS[object.apiVersion]}/${object.kind}`;
  const model = (await import(from))[object.kind];
  try {
    new model(object).validate();
  } catch (error) {
    problems.push(`${name}: ${error.message}`);
  }
  const text = `import type { I${object.kind} } from '${from}';\nexport const o: I${object.kind} = ${JSON.stringify(object, null, 1)};\n`;
  sources.set(path.join(import.meta.dirname, `object-${number}.ts`), { name, text });
}
const options = { noEmit: true, strict: true, skipLibCheck: true, module: ts.ModuleKind.NodeNext, types: [] };
const host = ts.createCompilerHost(options);
const read = host.readFile;
host.readFile = (file) => sources.get(path.resolve(file))?.text ?? read(file);
const exists = host.fileExists;
host.fileExists = (file) => sources.has(path.resolve(file)) || exists(file);
const open = host.getSourceFile;
host.getSourceFile = (file, ...rest) => {
  const own = sources.get(path.resolve(file));
  return own ? ts.createSourceFile(file, own.text, ts.ScriptTarget.Latest) : open(file, ...rest);
};
const program = ts.createProgram([...sources.keys()], options, host);
for (const found of ts.getPreEmitDiagnostics(program)) {
  const name = found.file ? (sources.get(path.resolve(found.file.fileName))?.name ?? found.file.fileName) : 'typescript';
  problems.push(`${name}: ${ts.flattenDiagnosticMessageText(found.messageText, ' ')}`);
}
console.log(JSON.stringify(problems));
